"""`dtrain -m <words>`: every combination of the values, each a complete run in a folder of its own; `dtrain sweep <act>
<folder or URL>`: what came of it.

dtrain -m optim.lr=1e-3,3e-3 seed=range(0,4) sweep.out=runs/s     eight runs, as many at a time as there is room for
                                                                  the same command again runs what is missing
dtrain sweep work s3://bucket/s           take jobs of a sweep that another host began, until none is left
dtrain sweep ls runs/s                    its jobs, as `dtrain runs` lists them; best: the best one
dtrain sweep why runs/s                   what the jobs that failed failed of
"""

import itertools
import random
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from dtrain.cluster import detect
from dtrain.compose import compose, connect
from dtrain.compose.sweep import multirun as by_hydra
from dtrain.config.schema import Config
from dtrain.config.word import cut
from dtrain.errors import DtrainError, WordsError
from dtrain.launcher import preflight, zygote
from dtrain.launcher.run import LOOK_SECONDS
from dtrain.lifecycle import signals
from dtrain.recipe import requires
from dtrain.result import EXIT_CODES, note_code
from dtrain.secrets import redact_arg, screen
from dtrain.storage import store
from dtrain.sweep import folder, jobs
from dtrain.sweep.engine import Engine, summary
from dtrain.sweep.folder import Job
from dtrain.sweep.proposer import Ended, Listed
from dtrain.sweep.space import label
from dtrain.verb import runs
from dtrain.verb.train import decide, one

SHOWN = 30
"""The most jobs that are listed at the end."""


def run(words: Sequence[str]) -> int:
    act, places = (words[0] if words else ""), [word for word in words[1:] if "=" not in word or "://" in word]
    if act not in ACTS or len(places) != 1:
        raise WordsError(f"sweep: type dtrain sweep <{', '.join(ACTS)}> <the folder or URL of a sweep>.")
    root, more = places[0].rstrip("/") or "/", [word for word in words[1:] if word not in places]
    connect(more, root)
    return ACTS[act](root, more)


def multirun(words: Sequence[str]) -> int:
    """`dtrain -m <words>`. Exit codes: 0 all jobs are finished, 1 some failed, 75 or 130 asked to stop."""
    if any(re.match(r"\+*hydra[/.](launcher|sweeper)\b", word) for word in words):
        return _by_hydra(words)
    request = jobs.read(words)
    with zygote.kept():
        return _take_part([request], begin=True)


def _work(root: str, more: Sequence[str]) -> int:
    """Take jobs of a sweep that another command began."""
    with zygote.kept():
        if not store.is_local(root):
            zygote.begin()  # a client of that storage starts threads
        return _take_part(jobs.again(root, more), begin=False)


def _take_part(requests: Sequence[jobs.Request], *, begin: bool) -> int:
    """Run the jobs that are not finished. `begin`: describe the sweep in its folder; otherwise it was begun by another
    command, and the jobs are taken in another order.
    """
    root, cluster = requests[0].root, detect()
    if cluster.external:
        raise WordsError("-m: ranks of an outer launcher cannot run a sweep. Type the command once, without it.")
    judged = [jobs.judged(request, cluster, decide) for request in requests]
    config, plan, slots = judged[0].config, judged[0].plan, judged[0].slots
    every = list({job.name: job for each in judged for job in each.jobs}.values())
    requires.check(config, cluster)
    if not store.is_local(root):
        zygote.begin()  # a client of that storage starts threads
    with store.patience(LOOK_SECONDS):
        preflight.check(replace(plan, out=root))
    note_code()
    if begin:
        folder.join(root, requests[0].description())
    states = folder.states(root, every)
    left = [job for job in every if states[job.name].status != "finished"]
    done = len(every) - len(left)
    screen.say(
        f"{len(every)} jobs in {cut(root)}"
        + f", of which {done} are finished" * bool(done)
        + f"; {min(slots, len(left))} at a time" * bool(left)
    )

    ends = itertools.count(done + 1)

    def ended(job: Job, how: Ended, seconds: float) -> None:
        number = f"[{next(ends)}/{len(every)}]"
        if how.status == "failed":
            screen.complain(f"{number} {label(job.values)} failed: {how.error}")
        else:
            line = f"{number} {how.status} {label(job.values)}{_figure(config, how)} · {seconds:.1f} s"
            screen.say(screen.on_one_line(line))

    if not begin:
        random.shuffle(left)
    engine = Engine(
        root,
        lambda job, slot: jobs.decided(job, root, judged[0], decide, slot),
        slots,
        config.sweep.retries,
        config.sweep.fail == "stop",
        jobs.modules(plan),
        Listed(left),
        ended,
    )
    engine.run()
    if len(every) <= SHOWN:
        runs.show(root)
    for line in summary(engine.failed.values()):
        screen.complain(f"failed: {line}")
    missing = len(left) - len(engine.finished)
    if missing:
        screen.say(f"{len(every) - missing} of {len(every)} jobs are finished; the same command goes on")
    return _exit_code(bool(engine.failed))


def _ls(root: str, more: Sequence[str]) -> int:
    return runs.run([root, *more])


def _best(root: str, more: Sequence[str]) -> int:
    return runs.run(["best", root, *more])


def _why(root: str, more: Sequence[str]) -> int:
    """The cause of each job that has failed, a line each."""
    causes = folder.failures(root)
    for name, facts in causes.items():
        screen.say(screen.on_one_line(f"{name}: {cut(str(facts.get('error', 'unknown')), 300)}"))
    screen.say(f"{len(causes)} of {len(store.folders(root))} jobs have failed" if causes else "no job has failed")
    return 0


ACTS: dict[str, Callable[[str, Sequence[str]], int]] = {"work": _work, "ls": _ls, "best": _best, "why": _why}


def _exit_code(failed: bool) -> int:
    request = signals.stop_request()
    if request:
        return EXIT_CODES["interrupted" if request == signal.SIGINT else "preempted"]
    return int(failed)


def _figure(config: Config, ended: Ended) -> str:
    name, value = figure(config, ended.metrics, ended.loss)
    return "" if value is None else f" · {name} {value:.4g}"


def figure(config: Config, metrics: dict[str, float], loss: float | None) -> tuple[str, float | None]:
    """The metric of a job: `checkpoint.best`, else the held-out loss, else the training loss."""
    for name in (config.checkpoint.get("best"), "eval_loss"):
        if name in metrics:
            return name, metrics[name]
    return "training loss (no held-out data)", loss


def _by_hydra(words: Sequence[str]) -> int:
    """Let a Hydra launcher or sweeper run the jobs one after another in this process. A failed job does not stop the
    others.
    """
    failed, measured = list[int](), list[str]()

    def job(words: Sequence[str]) -> float | None:
        try:
            config = compose(words)
            result = one(config)
        except DtrainError as error:
            screen.complain(f"{' '.join(cut(redact_arg(word)) for word in words)}: {error}")
            failed.append(error.exit_code)
            return None
        if result.exit_code:  # asked to stop: that means the sweep, not one job
            sys.exit(result.exit_code)
        name, value = figure(config, result.metrics, result.loss)
        measured.append(name)
        return value

    with zygote.kept():
        root = by_hydra(words, job, check=lambda words: decide(compose(words), detect()))
    if measured:
        screen.say(f"the objective value that a Hydra sweeper gets from each job: {', '.join(dict.fromkeys(measured))}")
    runs.show(root)
    return max(failed, default=0)
