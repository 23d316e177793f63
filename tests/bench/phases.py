"""One job of a sweep phase by phase: CPU milliseconds and page faults of each, in children forked as a sweep forks them.

    OMP_NUM_THREADS=1 python tests/bench/phases.py [--jobs 40]

A phase counts what is in no other phase; medians over the jobs. "fork and exit" is what the kernel counts beside them.
"""

import argparse
import functools
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

WORDS = ["model=mlp", "data=synthetic", "objective=regression", "steps=20"]


class Clock:
    """Gives what was spent since the last call to the phase that was on."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._on, self._last = ["the rest"], self._now()

    @staticmethod
    def _now() -> tuple[float, int]:
        return time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def enter(self, phase: str) -> None:
        self._account()
        self._on.append(phase)

    def leave(self) -> None:
        self._account()
        self._on.pop()

    def _account(self) -> None:
        now = self._now()
        row = self.spent.setdefault(self._on[-1], [0.0, 0])
        row[0] += 1e3 * (now[0] - self._last[0])
        row[1] += now[1] - self._last[1]
        self._last = self._now()

    def timed(self, phase: str | Callable[[], str], act: Callable[..., Any]) -> Callable[..., Any]:
        """`act`, whose own time, and that of the context it returns, is counted for `phase`."""

        @functools.wraps(act)
        def wrapper(*arguments: Any, **options: Any) -> Any:
            name = phase if isinstance(phase, str) else phase()
            self.enter(name)
            try:
                result = act(*arguments, **options)
            finally:
                self.leave()
            is_context = isinstance(result, AbstractContextManager) and hasattr(result, "gen")
            return _Timed(self, name, result) if is_context else result

        return wrapper


class _Timed(AbstractContextManager[Any]):
    def __init__(self, clock: Clock, phase: str, inner: AbstractContextManager[Any]) -> None:
        self._clock, self._phase, self._inner = clock, phase, inner

    def __enter__(self) -> Any:
        self._clock.enter(self._phase)
        try:
            return self._inner.__enter__()
        finally:
            self._clock.leave()

    def __exit__(self, *error: Any) -> bool | None:
        self._clock.enter(self._phase)
        try:
            return self._inner.__exit__(*error)
        finally:
            self._clock.leave()


def watch(clock: Clock) -> None:
    """Put the clock around the phases of a run."""
    import gc

    import dtrain.backend.gloo as gloo
    import dtrain.launcher.run as run
    import dtrain.loop.metrics as metrics
    import dtrain.train as train
    from dtrain.checkpoint.sharded import Sharded
    from dtrain.evaluation.observe import Observers
    from dtrain.launcher import unwatched
    from dtrain.loop import assemble

    steps, make_step = iter(range(10**9)), assemble.make_step
    assemble.make_step = lambda *arguments, **options: clock.timed(
        lambda: "steps 2 to 20" if next(steps) else "first step", make_step(*arguments, **options)
    )
    for owner, name, phase in (
        (run.lease, "hold", "lease"),
        (run, "_describe", "config.yaml, plan.yaml"),
        (run, "finished", "is it finished?"),
        (unwatched, "alone", "reports of failures"),
        (gloo, "process_group", "process group"),
        (train, "Mesh", "mesh, watchdog"),
        (train.Watchdog, "__enter__", "mesh, watchdog"),
        (train.Watchdog, "__exit__", "mesh, watchdog"),
        (train, "Log", "log and loggers"),
        (metrics.Log, "__enter__", "log and loggers"),
        (metrics.Log, "__exit__", "log and loggers"),
        (metrics.Log, "event", "log and loggers"),
        (metrics.Log, "started", "log and loggers"),
        (metrics.Log, "flush", "log and loggers"),
        (metrics.Log, "record", "log and loggers"),
        (metrics.Log, "evaluated", "log and loggers"),
        (metrics.Log, "finish", "log and loggers"),
        (train, "assemble", "model, optimizer, data"),
        (train, "prepare", "model, optimizer, data"),
        (train.build_check, "check", "checks of what was built"),
        (train, "Observers", "checks of what was built"),
        (gc, "collect", "gc.collect"),
        (Observers, "look", "looks at each step"),
        (Observers, "evaluate", "evaluation"),
        (Sharded, "save", "checkpoint"),
        (Sharded, "wait", "checkpoint"),
        (Sharded, "restore", "checkpoint"),
        (Sharded, "finished_saves", "checkpoint"),
    ):
        setattr(owner, name, clock.timed(phase, getattr(owner, name)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=40)
    asked = parser.parse_args()

    from dtrain import recipe
    from dtrain.cluster import detect
    from dtrain.compose import compose
    from dtrain.launcher import process, warm
    from dtrain.sweep import job, jobs
    from dtrain.verb.decide import decide

    warm.load()
    os.chdir(tempfile.mkdtemp())
    made = []
    for seed in range(asked.jobs):
        config = compose([*WORDS, f"seed={seed}", f"out=s/j{seed}"])
        plan = decide(config, detect())
        config.threads = plan.threads
        made.append((plan, recipe.write(config)))
    job.prepare(jobs.modules(made[0][0]))
    import gc

    gc.freeze()
    rows, whole = [], []
    for plan, config in made:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = Path(f"{plan.out}.json").resolve()
        result.parent.mkdir(exist_ok=True)

        def work(plan: Any = plan, config: str = config, result: Path = result) -> None:
            clock = Clock()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            clock.enter("instruments")
            watch(clock)
            clock.leave()
            job._run(plan, config)
            clock.enter("end")
            result.write_text(json.dumps(clock.spent))

        pid = process.fork(work, "dtrain-job")
        os.waitpid(pid, 0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = json.loads(result.read_text())
        spent.pop("instruments")
        cpu = 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        faults = after.ru_minflt - before.ru_minflt
        spent["fork and exit"] = [
            cpu - sum(row[0] for row in spent.values()),
            faults - sum(r[1] for r in spent.values()),
        ]
        rows.append(spent)
        whole.append((cpu, faults))
    phases = dict.fromkeys(name for row in rows for name in row)
    print("| phase | CPU ms | pages |")
    for name in phases:
        cpu, faults = (statistics.median(row.get(name, [0, 0])[index] for row in rows) for index in (0, 1))
        print(f"| {name} | {cpu:.1f} | {faults:.0f} |")
    print("| together | {:.1f} | {:.0f} |".format(*(statistics.median(each) for each in zip(*whole, strict=True))))


if __name__ == "__main__":
    main()
