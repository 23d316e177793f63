"""Reports when steps become ten times slower, with the cause as far as this host shows it. Does not affect training."""

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dtrain.lifecycle.waiting import Meter, cores

SLOWER = 10
"""Steps are slow if they take more than this multiple of the best time."""
AGAIN = 3
"""Slow steps are fast again if they take less than this multiple of the best time."""
STEPS, SHORT, LONG = 64, 1.0, 20.0
"""Steps are judged in groups of at least STEPS steps (the most that `data.stream` reads at a time) and SHORT seconds,
or of at least LONG seconds.
"""
TWICE = 2
"""Number of slow groups in a row before a report."""
TAKEN = 0.4
"""Smallest weight of a reported cause: cores that others use, or the fraction of time without a core or samples."""
PAGES = 100
"""Major page faults per second that have weight 1."""


class Slowdown:
    """Detects slow steps of one start. `waited`: the total seconds that steps waited for samples."""

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
                mean, self._steps, self._seconds = self._seconds / self._steps, 0, 0.0
                yield from self._judge(step, mean)
        if not self._slow and time.perf_counter() - self._since[0] > SHORT:
            self._mark()

    def _judge(self, step: int, mean: float) -> Iterator[str]:
        best, streak, self._best = self._best, self._slow, min(self._best, mean)
        self._slow = streak + 1 if mean > best * (AGAIN if streak >= TWICE else SLOWER) else 0
        if self._slow == TWICE:
            yield (
                f"up to step {step} a step takes {_of(mean)}, {mean / best:.0f} times as long as before ({_of(best)}): "
                f"{self._cause()}"
            )
        elif streak >= TWICE and not self._slow:
            yield f"up to step {step} a step takes {_of(mean)} again"

    def _mark(self) -> None:
        """Start to measure causes."""
        self._meter, self._since = Meter(), self._now()

    def _cause(self) -> str:
        now, waited, throttled, pages = (here - before for here, before in zip(self._now(), self._since, strict=True))
        others = self._meter.others()
        causes = {
            f"{waited / now:.0%} of the time it waits for samples (data)": waited / now,
            f"other processes on this host use {others:.1f} of its {cores()} cores": others,
            f"its control group throttles it {throttled / now:.0%} of the time (its CPU quota)": throttled / now,
            f"memory is short: {pages / now:.0f} pages per second are read back from disk": pages / now / PAGES,
        }
        texts = " and ".join(text for text, weight in causes.items() if weight >= TAKEN)
        return texts or "this host shows no cause; if there are other hosts, check them and the network between them"

    def _now(self) -> tuple[float, float, float, float]:
        """(seconds now, seconds waiting for samples, seconds throttled by the control group, major page faults)"""
        return time.perf_counter(), self._waited(), _throttled(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _throttled() -> float:
    """Seconds in which this process was throttled by the CPU quota of its control group."""
    for path, name, unit in (
        ("/sys/fs/cgroup/cpu.stat", "throttled_usec", 1e-6),
        ("/sys/fs/cgroup/cpu/cpu.stat", "throttled_time", 1e-9),
    ):
        try:
            stat = dict(line.split() for line in Path(path).read_text("utf-8").splitlines())
            return int(stat[name]) * unit
        except (OSError, KeyError, ValueError):  # no such control groups
            continue
    return 0.0


def _of(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
