"""How OpenMP threads wait: they spin while cores are free, and sleep when other processes need the cores.

A spinning thread blocks the core that the thread it waits for may need: on two cores beside two busy processes, a step
of a small GPT takes 3 to 40 times as long as with sleeping threads; on free cores, sleeping threads make it twice as
long (tests/bench/history.md). OpenMP reads its setting only once, when torch is loaded; this module follows the load.
It does not change any result.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables by which the user chooses; then this module does nothing."""
SHORTEST = 0.05
"""Seconds of the shortest measurement, because the system counts in hundredths."""
SPARE = 0.5
"""Cores that other processes may take before our threads sleep."""
PERIOD = 1.0
"""Seconds between two measurements."""
MOST = 16
"""Largest number of sleeping threads."""


class Meter:
    """Measures the load of other processes since its construction."""

    def __init__(self) -> None:
        self._since = _clocks()

    def others(self) -> float:
        """The average number of this process's cores that other processes took, except the ranks of this host, which
        are assumed to take as much as this one. 0 if the system does not report it, or before SHORTEST.
        """
        if not self._since:
            return 0.0
        now, own, idle = (here - before for here, before in zip(_clocks(), self._since, strict=True))
        return max(0.0, cores() - (idle + ranks() * own) / now) if now >= SHORTEST else 0.0

    def crowds(self, threads: int) -> bool:
        """Whether other processes took cores that `threads` threads of each rank need."""
        return self.others() > cores() - threads * ranks() + SPARE


@contextmanager
def yielding(threads: int, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """A context in which the `threads` of this rank spin only briefly whenever others take the cores that they need.

    libgomp spins briefly when it has more threads than cores (GOMP_SPINCOUNT in its manual), and counts all threads
    that have used it: so a few threads that used it once and sleep are enough.
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
            was_crowded, is_crowded, meter = is_crowded, meter.crowds(threads), Meter()
            if is_crowded and not was_crowded:
                stack.enter_context(_asleep(sleepers))
            elif was_crowded and not is_crowded:
                stack.close()


@contextmanager
def _asleep(number: int) -> Iterator[None]:
    """A context with `number` sleeping threads that have used OpenMP."""
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
    """The ranks of this run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _clocks() -> list[float]:
    """Seconds: now, of CPU time of this process, and of idle time of all its cores (proc(5): the fourth and fifth
    figure of each); empty if the system does not report them.
    """
    try:
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [line.split() for line in Path("/proc/stat").read_text("utf-8", errors="replace").splitlines()]
        idle = sum(int(row[4]) + int(row[5]) for row in rows if row[0] in mine) / os.sysconf("SC_CLK_TCK")
        return [time.monotonic(), time.process_time(), idle]
    except (AttributeError, OSError, IndexError, ValueError):
        return []
