"""Loading processes: the sample that each reads, and its stack when the rank sends SIGUSR2, even in native code."""

import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtrain.config import environment
from dtrain.lifecycle import stacks
from dtrain.lifecycle.signals import REPORT
from dtrain.secrets import screen

ANSWER_SECONDS, QUIET_SECONDS = 3.0, 0.2
"""How long to wait for a stack, and the pause after which it counts as complete."""
UNGUARDED_CODE = 79
"""Exit code of a process that began by running the training again."""
UNGUARDED = (
    "dtrain.run is called as this script is imported, and each process of data.workers imports it. Write "
    '`if __name__ == "__main__":` above the call and indent the call below it, or type data.workers=0.'
)

_tables: list[Any] = []
_mine: list[tuple[Any, int]] = []
"""The table and slot of this loading process."""


def end_if_starting() -> None:
    """End a process that still imports the script of its parent, whose call of `dtrain.run` is not its own."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        screen.complain(UNGUARDED)
        os._exit(UNGUARDED_CODE)


# in the rank


def table(workers: int) -> Any:
    """Memory shared with the loading processes: pid of each, then 1 + the sample that each is reading."""
    table = multiprocessing.get_context("spawn").RawArray("q", 2 * workers)
    _tables.append(table)
    return table


def reading() -> dict[int, int]:
    """pid -> the sample that it is reading; -1 while it reads none"""
    return {pid: sample - 1 for table in _tables for pid, sample in zip(table[::2], table[1::2], strict=True) if pid}


def loader_stacks(folder: Path) -> dict[int, list[str]]:
    """pid -> the stack of a loading process, outermost line first; empty if it does not respond"""
    living = {child.pid for child in multiprocessing.active_children()}
    files = {pid: path for pid in reading() if pid in living and (path := _file(folder, pid)).exists()}
    before = written = _sizes(files)
    for pid in files:
        with suppress(ProcessLookupError):
            os.kill(pid, REPORT)
    now = changed = time.monotonic()
    deadline, is_complete = now + ANSWER_SECONDS, not files
    while not is_complete and now < deadline:
        time.sleep(0.02)
        now, sizes = time.monotonic(), _sizes(files)
        written, changed = sizes, now if sizes != written else changed
        is_complete = now - changed >= QUIET_SECONDS and all(written[pid] != before[pid] for pid in files)
    return {
        pid: stacks.current(path.read_text("utf-8", errors="replace")[before[pid] :]) for pid, path in files.items()
    }


def _sizes(files: Mapping[int, Path]) -> dict[int, int]:
    return {pid: path.stat().st_size for pid, path in files.items()}


def reader(folder: Path) -> tuple[str, list[str]] | None:
    """The position of a loading process that is reading a sample, as text, and its stack."""
    for pid, stack in loader_stacks(folder).items():
        if reading()[pid] < 0:
            continue
        where = stacks.dumped("Current thread 0x\n" + "\n".join(stack[::-1]))
        sample, heading = f"sample {reading()[pid]} of data.dataset", f"loading process {pid}:"
        if where:
            return f"{where} (loading process {pid}, {sample})", [heading, *stack]
        if not stack:
            return f"loading process {pid}, which does not answer ({sample})", [heading]
    return None


# in a loading process


def answer(shared: Any, slot: int) -> None:
    """Set up a loading process: take a slot in the table, and answer SIGUSR2."""
    folder = os.environ.get(environment.REPORTS, "")
    if folder and Path(folder).is_dir():
        faulthandler.register(REPORT, _file(Path(folder), os.getpid()).open("w", encoding="utf-8"), all_threads=True)
    else:  # nobody asks, or the rank has ended while this process began
        signal.signal(REPORT, signal.SIG_IGN)
    shared[2 * slot] = os.getpid()  # last: the rank may signal a pid in the table
    _mine[:] = [(shared, slot)]


def note(sample: int) -> None:
    """Record which sample is being read, -1 for none; the rank reports it if this process dies."""
    for shared, slot in _mine:
        shared[2 * slot + 1] = sample + 1


def _file(folder: Path, pid: int) -> Path:
    return folder / f"loading-{pid}.txt"
