"""How the threads of a rank wait for each other: spinning where cores are free, asleep where other processes compute.

A thread that spins keeps the core from the one it waits for: on two cores beside two busy processes a step of a small GPT took ten times as long as
with threads that sleep, which in turn cost a step half as much again where the cores are free (tests/bench/RESULTS.md). OpenMP reads the choice once,
when torch is loaded, so it is made before that, by what was seen since `watch`. No number depends on it.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables with which a user chooses."""
_since: list[float] = []
SHORTEST = 0.05
"""Seconds; the system counts in hundredths."""
SPARE = 0.5
"""Cores that others may take of those our threads need, before these sleep."""


def watch() -> None:
    """The command begins."""
    _since[:] = _since or _clocks()


def policy(threads: int, ranks: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the environment of `ranks` processes of so many `threads`, which load torch after this, is to have beside `environ`."""
    is_open = threads > 1 and "torch" not in sys.modules and not any(name in environ for name in CHOSEN)
    return {"OMP_WAIT_POLICY": "PASSIVE"} if is_open and others(ranks) > _cores() - threads * ranks + SPARE else {}


def others(ranks: int = 1) -> float:
    """Cores of those this process may use that were taken since `watch`, on average, by others than it and its fellow ranks, `ranks` in all. 0 where
    the system does not tell."""
    now, own, idle = (here - before for here, before in zip(_clocks(), _since, strict=True)) if _since else (0.0, 0.0, 0.0)
    if now < SHORTEST:
        return 0.0
    return max(0.0, _cores() - (idle + own) / now - (ranks - 1))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _clocks() -> list[float]:
    """Seconds: now, of this process's own work, and for which its cores had nothing to do, all of them together (proc(5), the fourth and fifth
    figure of each); nothing where the system does not tell."""
    try:
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        idle = sum(int(row[4]) + int(row[5]) for row in rows if row[0] in mine) / os.sysconf("SC_CLK_TCK")
        return [time.monotonic(), time.process_time(), idle]
    except (AttributeError, OSError, IndexError, ValueError):
        return []
