"""Reports steps that became ten times slower, with the cause that this host shows. Changes no number."""

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dtrain.lifecycle.waiting import Meter, cores

SLOWER = 10
"""Steps are slow above this multiple of the best time."""
AGAIN = 3
"""Slow steps are fast again below this multiple of the best time."""
STEPS, SHORT, LONG = 64, 1.0, 20.0
"""A group of steps is judged when it has this many (as `data.stream` reads at a time) and this many seconds, or this
many seconds alone.
"""
TWICE = 2
"""Slow groups in a row before a report."""
TAKEN = 0.4
"""The least weight of a cause: cores that others take, the fraction of time without a core or without samples."""
PAGES = 100
"""Major page faults in a second that count as weight 1."""


class Slowdown:
    """Judges the steps of one start. `waited`: the total seconds in which steps waited for samples."""

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._best = float("inf")
        self._slow = self._steps = 0
        self._seconds = 0.0
        self._mark()

    def look(self, steps: Iterable[tuple[int, float]]) -> Iterator[str]:
        """Take the newest (step, seconds); yield a sentence when steps become slow, and when they are fast again."""
        for step, seconds in steps:
            self._steps, self._seconds = self._steps + 1, self._seconds + seconds
            if self._seconds >= (SHORT if self._steps >= STEPS else LONG):
                one, self._steps, self._seconds = self._seconds / self._steps, 0, 0.0
                yield from self._judge(step, one)
        if not self._slow and time.perf_counter() - self._since[0] > SHORT:
            self._mark()

    def _judge(self, step: int, one: float) -> Iterator[str]:
        best, was, self._best = self._best, self._slow, min(self._best, one)
        self._slow = was + 1 if one > best * (AGAIN if was >= TWICE else SLOWER) else 0
        if self._slow == TWICE:
            yield (
                f"up to step {step} a step takes {_of(one)}, {one / best:.0f} times what it took ({_of(best)}): "
                f"{self._cause()}"
            )
        elif was >= TWICE and not self._slow:
            yield f"up to step {step} a step takes {_of(one)} again"

    def _mark(self) -> None:
        """Measure causes from now on."""
        self._meter, self._since = Meter(), self._now()

    def _cause(self) -> str:
        now, waited, throttled, pages = (here - before for here, before in zip(self._now(), self._since, strict=True))
        others = self._meter.others()
        causes = {
            f"{waited / now:.0%} of the time it waits for samples (data)": waited / now,
            f"other processes of this host take {others:.1f} of its {cores()} cores": others,
            f"the control group keeps it from the cores {throttled / now:.0%} of the time (its CPU quota)": throttled
            / now,
            f"memory is short, {pages / now:.0f} pages a second are read back from the disk": pages / now / PAGES,
        }
        texts = [text for text, weight in causes.items() if weight >= TAKEN]
        if not texts:
            return "this host shows no cause; where there are several, look at the others and at what connects them"
        return " and ".join(texts)

    def _now(self) -> tuple[float, float, float, float]:
        """Seconds: now, waiting for samples, throttled by the control group; major page faults."""
        return time.perf_counter(), self._waited(), _throttled(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _throttled() -> float:
    """Seconds in which this process was throttled by the CPU quota of its control group."""
    for path, name, unit in (
        ("/sys/fs/cgroup/cpu.stat", "throttled_usec", 1e-6),
        ("/sys/fs/cgroup/cpu/cpu.stat", "throttled_time", 1e-9),
    ):
        try:
            stat = dict(line.split() for line in Path(path).read_text().splitlines())
            return int(stat[name]) * unit
        except (OSError, KeyError, ValueError):  # no such control groups
            continue
    return 0.0


def _of(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
