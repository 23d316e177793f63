"""Whether the steps of a run became ten times slower than they were, and what this host shows of the cause. Nothing
here changes a number.
"""

import resource
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dtrain.lifecycle.waiting import Meter, cores

SLOWER = 10
"""Times what steps took."""
AGAIN = 3
"""Times what steps took, below which they are as they were."""
STEPS, SHORT, LONG = 64, 1.0, 20.0
"""Steps are judged together, so many (as `data.stream` reads at a time) that take so many seconds, or fewer that take
so many; twice in succession, as one that hiccups is no slow run.
"""
TWICE = 2
TAKEN = 0.4
"""Cores that others take, the part of time without a core, or that goes by waiting for samples: below this it is no
cause.
"""
PAGES = 100
"""Read back from the disk in a second."""


class Slowdown:
    """Of one start of a run. `waited`: the seconds so far in which a step waited for its samples."""

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._best = float("inf")
        self._slow = self._steps = 0
        self._seconds = 0.0
        self._mark()

    def look(self, steps: Iterable[tuple[int, float]]) -> Iterator[str]:
        """The newest steps, and how long they took: sentences where steps have become slow, and where they are as fast
        again.
        """
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
        """Causes are looked for from here."""
        self._meter, self._since = Meter(), self._now()

    def _cause(self) -> str:
        now, waited, held, pages = (here - before for here, before in zip(self._now(), self._since, strict=True))
        others = self._meter.others()
        causes = {
            f"{waited / now:.0%} of the time it waits for samples (data)": waited / now,
            f"other processes of this host take {others:.1f} of its {cores()} cores": others,
            f"the control group keeps it from the cores {held / now:.0%} of the time (its CPU quota)": held / now,
            f"memory is short, {pages / now:.0f} pages a second are read back from the disk": pages / now / PAGES,
        }
        seen = [text for text, weight in causes.items() if weight >= TAKEN]
        return (
            " and ".join(seen)
            or "this host shows no cause; where there are several, look at the others and at what connects them"
        )

    def _now(self) -> tuple[float, float, float, float]:
        """Seconds: now, waited for samples, held back by the control group; pages read back."""
        return time.perf_counter(), self._waited(), _held(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _held() -> float:
    """Seconds in which the control group of this process had used up its quota."""
    for path, name, unit in (
        ("/sys/fs/cgroup/cpu.stat", "throttled_usec", 1e-6),
        ("/sys/fs/cgroup/cpu/cpu.stat", "throttled_time", 1e-9),
    ):
        try:
            told = dict(line.split() for line in Path(path).read_text().splitlines())
            return int(told[name]) * unit
        except (OSError, KeyError, ValueError):  # no such control groups
            continue
    return 0.0


def _of(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
