"""`dtrain -m <words>`: every combination of the values, each a complete run in a folder of its own; `dtrain sweep <act>
<folder or URL>`: what came of it.

dtrain -m optim.lr=1e-3,3e-3 seed=range(0,4) sweep.out=runs/s     eight runs, as many at a time as there is room for
                                                                  the same command again runs what is missing
dtrain sweep work s3://bucket/s           take jobs of a sweep that another host began, until none is left
dtrain sweep ls runs/s                    list its jobs, as `dtrain runs` does; best: show the best one
dtrain sweep why runs/s                   count the jobs of each cause of failure
dtrain sweep retry runs/s [<a job> ...]   run failed jobs again, all or those that are named
dtrain sweep stop s3://bucket/s           ask every worker, on any host, to save its jobs and end
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dtrain.cluster import detect
from dtrain.compose import connect
from dtrain.config.environment import HANDED
from dtrain.config.word import cut
from dtrain.errors import EXIT_CODES, StoreError, WordsError, first_line
from dtrain.launcher import preflight, zygote
from dtrain.launcher.run import LOOK_SECONDS
from dtrain.lifecycle import signals
from dtrain.recipe import requires
from dtrain.report import facts
from dtrain.report.runs import Run, below
from dtrain.resolve import time_limit
from dtrain.result import note_code, source_digest
from dtrain.secrets import masked, redact_arg, screen
from dtrain.storage import options, store
from dtrain.sweep import agenda, begun, folder, foreign, jobs, stop_request, trials
from dtrain.sweep.crew import Nodes, crew, split
from dtrain.sweep.engine import Engine, summary
from dtrain.sweep.folder import Job
from dtrain.sweep.live import Display, Lines, display
from dtrain.sweep.proposer import Ended, Proposer
from dtrain.sweep.space import label
from dtrain.sweep.stopping import Stopping
from dtrain.sweep.study import Study, value_of
from dtrain.sweep.trials import Trial
from dtrain.sweep.workers import by_crew
from dtrain.verb import runs
from dtrain.verb.decide import decide_for_slot

SHOWN, EQUALS = 30, 3
"""The most jobs that are listed at the end, and of those that are as good as the best."""


def run(words: Sequence[str]) -> int:
    act, places = (words[0] if words else ""), [word for word in words[1:] if "=" not in word or "://" in word]
    if act not in ACTS or not places or (len(places) > 1 and act != "retry"):
        raise WordsError(f"sweep: type dtrain sweep <{', '.join(ACTS)}> <the folder or URL of a sweep>.")
    root, more = places[0].rstrip("/") or "/", [word for word in words[1:] if word != places[0]]
    if handed := os.environ.pop(HANDED, ""):
        options.take_over(handed)
    connect(more, root)
    return ACTS[act](root, more)


def multirun(words: Sequence[str]) -> int:
    """`dtrain -m <words>`. Exit codes: 0 all jobs are finished, 1 some failed, 75 or 130 asked to stop."""
    ours, hydras = foreign.split(words)
    request = jobs.read(ours, proposed=bool(hydras.sweeper))
    foreign.check(hydras)
    request, nodes = split(request)
    if nodes and hydras.words:
        raise WordsError(f"{nodes.word}: {hydras.words[0]} starts the workers or proposes the jobs. Leave one out.")
    with zygote.kept():
        if hydras.sweeper:
            return _by_sweeper(request, hydras)
        return _take_part([request], begin=True, hydras=hydras, nodes=nodes)


def _by_sweeper(request: jobs.Request, hydras: foreign.Foreign) -> int:
    """Run the jobs that a sweeper of Hydra's proposes."""
    codes = [0]

    def run(requests: Sequence[jobs.Request]) -> list[Any]:
        judged = list[jobs.Judged | WordsError]()
        for each in requests:
            try:
                judged.append(jobs.judged(each, detect(), decide_for_slot))
            except WordsError as error:
                screen.complain(str(error))
                judged.append(error)
        right = [each for each, job in zip(requests, judged, strict=True) if not isinstance(job, WordsError)]
        codes.extend([1] * (len(right) < len(requests)))
        codes.extend([_take_part(right, begin=True, hydras=hydras)] if right else [])
        if signals.stop_request():
            sys.exit(codes[-1])
        return [job if isinstance(job, WordsError) else _figure_of(request.root, job) for job in judged]

    try:
        foreign.propose(hydras, request, run)
    except RuntimeError as error:  # of a job that failed, which its sweeper does not go on after
        screen.complain(f"hydra/sweeper={hydras.sweeper} ends: {first_line(error)}")
    return max(codes)


def _figure_of(root: str, judged: jobs.Judged) -> float | Exception:
    """The figure that a sweeper gets from the only job."""
    (job,) = folder.placed(root, judged.jobs)
    state = folder.state(root, job.name)
    if state.status == "finished":
        return value_of(judged.study.metrics[0], state.figures, state.loss)
    return RuntimeError(f"{label(job.values)}: {state.status}")


def _work(root: str, more: Sequence[str]) -> int:
    """Take jobs of a sweep that another command began."""
    with zygote.kept():
        if not store.is_local(root):
            zygote.begin()  # a client of that storage starts threads
        return _take_part(begun.again(root, more), begin=False)


def _retry(root: str, more: Sequence[str]) -> int:
    """Run jobs that have failed again: all of them, or those that are named."""
    names, there = [word for word in more if "=" not in word], folder.read(root)
    rungs = "none" if there is None else there.study.stop
    if names and rungs != "none":
        raise WordsError(
            f"retry: sweep.stop={rungs} decides which jobs go on. Type dtrain sweep retry {cut(root)} for all of them."
        )
    failed = [name for name, state in _states(root).items() if state.status == "failed"]
    chosen = [name.rstrip("/").rpartition("/")[2] for name in names] or failed
    unknown = [cut(name) for name in chosen if name not in failed]
    if unknown:
        raise WordsError(*(f"retry: {name} is no job in {cut(root)} that has failed." for name in unknown))
    if not failed:
        screen.say("no job has failed")
        return 0
    with zygote.kept():
        if not store.is_local(root):
            zygote.begin()  # a client of that storage starts threads
        requests = begun.again(root, [word for word in more if word not in names])
        return _take_part(requests, begin=False, only=frozenset(chosen if rungs == "none" else ()))


@store.starting()
def _stop(root: str, more: Sequence[str]) -> int:
    """Ask every worker of a sweep to stop."""
    if folder.read(root) is None:
        raise StoreError.during("find a sweep at", root, "it has no sweep.yaml")
    stop_request.ask(root)
    screen.say(
        f"asked: within {LOOK_SECONDS:.0f} s each worker of {cut(root)} has its jobs save, and ends. The command that "
        "began the sweep, or dtrain sweep work, goes on."
    )
    return 0


def _take_part(
    requests: Sequence[jobs.Request],
    *,
    begin: bool,
    only: frozenset[str] = frozenset(),
    hydras: foreign.Foreign = foreign.OURS,
    nodes: Nodes | None = None,
) -> int:
    """Run the jobs that are not finished; `only`: of these. `begin`: describe the sweep in its folder; otherwise it was
    begun by another command, and the jobs are taken in another order. `hydras`, `nodes`: who starts workers, and where.
    """
    root, cluster = requests[0].root, nodes.cluster if nodes else detect()
    if begin and cluster.external and cluster.external.world:
        raise WordsError("-m: ranks of an outer launcher cannot run a sweep. Type the command once, without it.")
    cluster = replace(cluster, external=None)  # each process of an outer launcher is a worker of its own
    if begin and not (hydras.launcher or nodes) and store.is_local(root) and folder.read(root) is None:
        zygote.begin()  # it loads torch while the jobs are judged
    judged = [jobs.judged(request, cluster, decide_for_slot) for request in requests]
    config, plan, slots = judged[0].config, judged[0].plan, judged[0].slots
    requires.check(config, cluster)
    leader = crew(judged[0], requests[0], hydras, nodes)
    if leader:
        leader.prepare()
    elif not store.is_local(root):
        zygote.begin()  # a client of that storage starts threads
    with store.starting():
        preflight.check(replace(plan, out=root, launcher=nodes.launcher if nodes else plan.launcher), of_sweep=True)
    looks_for = _describe(requests, judged, begin=begin)
    every = folder.placed(root, {job.digest: job for each in judged for job in each.jobs}.values())
    what = "trials" if looks_for.is_search else "jobs"
    proposer, total, done = (
        agenda.named(requests, judged, every, looks_for, only)
        if only
        else agenda.of(requests, judged[0], every, looks_for, shuffled=not begin)
    )
    screen.say(
        f"{total} {what} in {cut(root)}"
        + f", of which {done} are finished" * bool(done)
        + f"; {min(slots, total - done)} at a time" * (total > done and not nodes)
    )
    shown = Lines(total, done, looks_for) if leader else display(cut(root), total, done, looks_for)
    engine = (
        by_crew(leader, requests[0], judged[0], every, shown.ended)
        if leader
        else _engine(root, judged[0], proposer, shown)
    )
    if total > done or not leader:
        with shown:
            engine.run()
    if total > done and nodes and nodes.launcher.get("detach"):
        screen.say(f"the same words with launcher.detach=false follow it, dtrain stop {cut(root)} ends it")
        return 0
    _show(root, looks_for, 0 if hydras.sweeper else total, engine.failed.values())
    if isinstance(proposer, Stopping) and not leader:
        screen.say(proposer.report())
    elif engine.failed or engine.stopped or engine.is_something_left():
        said = f" · what the workers said: {leader.log}" if leader and leader.log else ""
        screen.say(f"{done + len(engine.finished)} of {total} {what} are finished; the same command goes on{said}")
    return _exit_code(bool(engine.failed) or (bool(leader) and engine.is_something_left()))


def _describe(requests: Sequence[jobs.Request], judged: Sequence[jobs.Judged], *, begin: bool) -> Study:
    """Write sweep.yaml if this command begins the sweep, and return what the sweep there looks for."""
    note_code()
    root, trusted = requests[0].root, (name.partition(".")[0] for name in judged[0].config.trust)
    code = {name: source_digest(name) for name in ("dtrain", *trusted)}
    for request, each in zip(requests, judged, strict=True) if begin else ():
        folder.join(root, request.description(each.study, code))
    there = folder.read(root)
    _note_changes(there.code if there else {}, code)
    return there.study if there else judged[0].study


def _note_changes(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    changed = ", ".join(name for name, digest in before.items() if now.get(name, digest) != digest)
    if changed:
        screen.complain(
            f"the source of {changed} is not that with which this sweep began. Finished jobs keep their numbers; type "
            "sweep.out=<another place> to run all of them with the new one.",
            begin="note: ",
        )


def _engine(root: str, judged: jobs.Judged, proposer: Proposer, shown: Display) -> Engine:
    sweep = judged.config.sweep
    return Engine(
        root=root,
        decide=lambda job, slot: jobs.decided(job, root, judged, decide_for_slot, slot),
        slots=judged.slots,
        retries=sweep.retries,
        stop_at_failure=sweep.fail == "stop",
        modules=jobs.modules(judged.plan),
        seconds=time_limit.seconds(sweep.time_limit),
        proposer=proposer,
        display=shown,
    )


def _show(root: str, study: Study, total: int, failed: Iterable[Ended]) -> None:
    """Print the best of `total` jobs, a table of them if they are few, and why others failed."""
    with suppress(StoreError):
        best, others = _best_of(root, study)
        for url in best[:SHOWN]:
            screen.say(f"best: {cut(url)}")
        if others:
            screen.say(_equal(others, study))
    if 0 < total <= SHOWN:
        runs.show(root)
    for line in summary(failed):
        screen.complain(f"failed: {line}")


def _states(root: str) -> dict[str, folder.State]:
    """The state of every folder of a sweep that may be a job."""
    return folder.states(root, [Job({}, (), name) for name in store.folders(root)])


@store.starting()
def _ls(root: str, more: Sequence[str]) -> int:
    there = folder.read(root)
    if more or there is None or all(name.startswith("eval_") for name in there.study.metrics):
        return runs.run([root, *more])
    screen.say(runs.table(_with_metrics(below(root), root, there.study)))
    return 0


def _with_metrics(shown: Iterable[Run], root: str, study: Study) -> list[Run]:
    """Runs of a sweep, with those of its metrics that are not held out, such as loss."""
    states, metrics = _states(root), [name for name in study.metrics if not name.startswith("eval_")]
    ended = {name: state for name, state in states.items() if state.status == "finished"}
    values = {
        store.join(root, name): {metric: value_of(metric, state.figures, state.loss) for metric in metrics}
        for name, state in ended.items()
    }
    return [replace(run, figures={**run.figures, **values.get(run.url, {})}) for run in shown]


@store.starting()
def _best(root: str, more: Sequence[str]) -> int:
    """The best job by the metric of the sweep, and how to run it again; of two metrics those that no other beats."""
    there = folder.read(root)
    if more or there is None or not there.study.metrics:
        return runs.run(["best", root, *more])
    best, others = _best_of(root, there.study)
    if not best:
        raise WordsError(f"best: no job in {cut(root)} has finished with a finite {' and '.join(there.study.metrics)}.")
    chosen = [run for url in best for run in below(url)]
    swept = dict.fromkeys(key for axes in there.spaces for key in axes)
    screen.say(runs.table(_with_metrics(chosen, root, there.study)))
    for run in chosen:
        words = [redact_arg(f"{key}={run.words[key]}") for key in swept if key in run.words]
        screen.say(f"its words: {' '.join(map(screen.typed, words))}")
        screen.say(f"run it again: dtrain {screen.typed(f'recipe={run.url}/config.yaml')} out=<another place>")
    if others:
        screen.say(_equal(others, there.study))
    return 0


def _best_of(root: str, study: Study) -> tuple[list[str], list[str]]:
    """The URLs of the best jobs: of one metric the first by name, as `<sweep>/best` is, and the names of its equals; of
    two metrics all that no other beats.
    """
    ended = [
        Trial(0, {}, name, study.losses(state.figures, state.loss, state.last))
        for name, state in sorted(_states(root).items())
        if state.status == "finished"
    ]
    names = [trial.job for trial in trials.unbeaten(ended)]
    first = len(names) if len(study.metrics) > 1 else 1
    return [store.join(root, name) for name in names[:first]], names[first:]


def _equal(names: Sequence[str], study: Study) -> str:
    """The sentence about jobs that are as good as the best."""
    more = f" and {len(names) - EQUALS} more" if len(names) > EQUALS else ""
    listed = f"{', '.join(map(cut, names[:EQUALS]))}{more}"
    return f"with the same {study.metrics[0]}: {listed}. The best is the first by name."


@store.starting()
def _why(root: str, more: Sequence[str]) -> int:
    """The jobs that have failed, by cause. Causes that differ in numbers alone are one."""
    alike: dict[str, list[str]] = {}
    states = _states(root)
    written = {name: str(cause.get("error", "unknown")) for name, cause in folder.failures(root).items()}
    causes = {name: written.get(name) or state.reason for name, state in states.items() if state.status == "failed"}
    for name, error in causes.items():
        alike.setdefault(facts.alike(error), []).append(name)
    for names in sorted(alike.values(), key=len, reverse=True):
        screen.say(screen.on_one_line(f"{len(names)} x {cut(masked(causes[names[0]]), 300)}"))
        more_of_them = [f"    and {len(names) - SHOWN} more"] * (len(names) > SHOWN)
        screen.say(*(f"    {cut(name)}" for name in names[:SHOWN]), *more_of_them)
    begun = sum(state.status != "new" for state in states.values())
    screen.say(f"{len(causes)} of {begun} jobs have failed" if causes else "no job has failed")
    return 0


ACTS: dict[str, Callable[[str, Sequence[str]], int]] = {
    "work": _work, "ls": _ls, "best": _best, "why": _why, "retry": _retry, "stop": _stop,
}  # fmt: skip


def _exit_code(failed: bool) -> int:
    request = signals.stop_request()
    if request:
        return EXIT_CODES["interrupted" if request == signal.SIGINT else "preempted"]
    return int(failed)
