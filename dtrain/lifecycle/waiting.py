"""How the threads of a rank wait for each other: spinning where cores are free, for a moment only where other processes
compute.

A thread that spins keeps the core from the one it waits for: on two cores beside two busy processes a step of a small
GPT takes three to forty times as long as with threads that sleep, which in turn cost a step twice as much where the
cores are free (tests/bench/RESULTS.md). OpenMP reads a choice once, when torch is loaded; this one follows what
changes. No number depends on it.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which a user chooses."""
SHORTEST = 0.05
"""Seconds; the system counts in hundredths."""
SPARE = 0.5
"""Cores that others may take of those our threads need, before these sleep."""
PERIOD = 1.0
"""Seconds between two looks at who else computes."""
MOST = 16
"""Threads that do nothing but sleep."""


class Meter:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._since = _clocks()

    def others(self) -> float:
        """Cores of those this process may use that were taken, on average, by others than it and its fellow ranks on
        this host, of which each takes as much as it. 0 where the system does not tell, or not yet.
        """
        now, own, idle = (
            (here - before for here, before in zip(_clocks(), self._since, strict=True))
            if self._since
            else (0.0, 0.0, 0.0)
        )
        return max(0.0, cores() - (idle + ranks() * own) / now) if now >= SHORTEST else 0.0

    def crowds(self, threads: int) -> bool:
        """Whether others took cores that so many threads of each rank need."""
        return self.others() > cores() - threads * ranks() + SPARE


@contextmanager
def yielding(threads: int, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """While it is open, the `threads` of this rank spin for a moment only whenever others take the cores that they
    need.

    libgomp spins for a moment where it has more threads than there are cores (GOMP_SPINCOUNT in its manual), and counts
    the threads of all that have used it: so a few that used it once and sleep are enough, until they end.
    """
    sleepers = (cores() - threads) // max(1, threads - 1) + 1
    if threads < 2 or sleepers > MOST or any(name in environ for name in CHOSEN):
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(over, threads, sleepers), name="dtrain-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(over: threading.Event, threads: int, sleepers: int) -> None:
    meter, stack = Meter(), ExitStack()
    with stack:
        is_crowded = False
        while not over.wait(PERIOD):
            was, is_crowded, meter = is_crowded, meter.crowds(threads), Meter()
            if is_crowded and not was:
                stack.enter_context(_asleep(sleepers))
            elif was and not is_crowded:
                stack.close()


@contextmanager
def _asleep(number: int) -> Iterator[None]:
    """So many threads that have used OpenMP, and do nothing."""
    import torch

    over = threading.Event()

    def sleep() -> None:
        torch.ones(1 << 20).add_(1.0)
        over.wait()

    sleepers = [threading.Thread(target=sleep, name="dtrain-asleep", daemon=True) for _ in range(number)]
    for sleeper in sleepers:
        sleeper.start()
    yield
    over.set()
    for sleeper in sleepers:
        sleeper.join()


def ranks() -> int:
    """Of this run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _clocks() -> list[float]:
    """Seconds: now, of this process's own work, and for which its cores had nothing to do, all of them together
    (proc(5), the fourth and fifth figure of each); nothing where the system does not tell.
    """
    try:
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        idle = sum(int(row[4]) + int(row[5]) for row in rows if row[0] in mine) / os.sysconf("SC_CLK_TCK")
        return [time.monotonic(), time.process_time(), idle]
    except (AttributeError, OSError, IndexError, ValueError):
        return []
