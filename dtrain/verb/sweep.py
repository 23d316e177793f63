"""`dtrain -m <words>`: every combination of the values, each a complete run in a folder of its own.

dtrain -m optim.lr=1e-3,3e-3 seed=range(0,4) sweep.out=runs/s     eight runs, as many at a time as there is room for
                                                                  the same command again runs what is missing
"""

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.compose.sweep import multirun
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
from dtrain.sweep.engine import Ended, Engine, summary
from dtrain.sweep.folder import Job
from dtrain.sweep.space import label
from dtrain.verb import runs
from dtrain.verb.train import decide, one

SHOWN = 30
"""The most jobs that are listed at the end."""


def run(words: Sequence[str]) -> int:
    """Exit codes: 0 all jobs are finished, 1 some failed, 75 or 130 asked to stop."""
    if any(re.match(r"\+*hydra[/.](launcher|sweeper)\b", word) for word in words):
        return _by_hydra(words)
    request, cluster = jobs.read(words), detect()
    if cluster.external:
        raise WordsError(
            "-m: ranks that somebody else started cannot run a sweep. Type the command once, without them."
        )
    judged = jobs.judged(request, cluster, decide)
    every, config, slots = judged.jobs, judged.config, judged.slots
    requires.check(config, cluster)
    with store.patience(LOOK_SECONDS):
        preflight.check(replace(judged.plan, out=request.root))
    note_code()
    folder.join(request.root, request.description())
    states = folder.states(request.root, every)
    left = [job for job in every if states[job.name].status != "finished"]
    done = len(every) - len(left)
    screen.say(
        f"{len(every)} jobs in {cut(request.root)}"
        + f", of which {done} are finished" * bool(done)
        + f"; {min(slots, len(left))} at a time" * bool(left)
    )

    def ended(job: Job, how: Ended, seconds: float, others: int) -> None:
        number = f"[{len(every) - others}/{len(every)}]"
        if how.status == "failed":
            screen.complain(f"{number} {label(job.values)} failed: {how.error}")
        else:
            screen.say(
                screen.on_one_line(f"{number} {how.status} {label(job.values)}{_figure(config, how)} · {seconds:.1f} s")
            )

    engine = Engine(
        request.root,
        lambda job, slot: jobs.decided(job, request.root, judged.cluster, decide, slot),
        slots,
        config.sweep.retries,
        config.sweep.fail == "stop",
        jobs.modules(judged.plan),
        ended,
    )
    with zygote.kept():
        engine.run(left)
    if len(every) <= SHOWN:
        runs.show(request.root)
    for line in summary(engine.failed.values()):
        screen.complain(f"failed: {line}")
    missing = len(left) - len(engine.finished)
    if missing:
        screen.say(f"{len(every) - missing} of {len(every)} jobs are finished; the same command goes on")
    return _exit_code(bool(engine.failed))


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
        root = multirun(words, job, check=lambda words: decide(compose(words), detect()))
    if measured:
        screen.say(f"the objective value that a Hydra sweeper gets from each job: {', '.join(dict.fromkeys(measured))}")
    runs.show(root)
    return max(failed, default=0)
