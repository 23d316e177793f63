"""Failure reports of a process that has no agent."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from dtrain.config import environment
from dtrain.errors import DtrainError, RankError, StoreError
from dtrain.lifecycle import kernel_log
from dtrain.lifecycle.failure import (
    KINDS,
    describe,
    explain,
    facts_of,
    failures,
    log_xids,
    mark_started,
    report_detected,
    report_exception,
    report_unresponsive,
    save,
    silent_ranks,
)
from dtrain.lifecycle.signals import REPORT, asked, by_signal, install
from dtrain.secrets import screen
from dtrain.storage import lease, leftovers, store

GIVE_UP_SECONDS = 5.0
"""How long a process that gives up waits for storage."""

ANSWER_SECONDS, LOOK_SECONDS = 2.0, 0.02
"""How long other ranks are waited for that are asked for a report, and the time between two looks."""

_alone: list[str] = []
"""`out` of the run, if no agent reports its failure."""


def is_watched() -> bool:
    """Whether an agent reads the reports of this process."""
    return not _alone


def reports() -> Path | None:
    """The folder for reports of this process, if anybody reads them."""
    folder = os.environ.get(environment.REPORTS)
    return Path(folder) if folder else None


def give_up(
    folder: Path | None, rank: int, message: str, *, kind: str = "hung", exit_code: int = 1, **facts: Any
) -> NoReturn:
    """End a process that cannot continue, from any of its threads: write its report, which one rank of the host prints
    if there is no agent, and return the lease. `kind` lost: the cause is not a rank.
    """
    with suppress(Exception), store.patience(GIVE_UP_SECONDS):  # the process must end, whatever fails here
        if folder:
            report_detected(folder, None if kind == "lost" else rank, kind, message, **facts)
            if _alone:
                ask_others(folder)
                (folder / "printed").touch(exist_ok=False)  # else another rank of this host has done it
                failure = explain(folder)
                screen.complain(failure.paragraph)
                save(_alone[0], failure.facts)
    with suppress(Exception), store.patience(GIVE_UP_SECONDS):
        lease.give_back(exit_code)
    os._exit(exit_code)


def ask_others(folder: Path) -> None:
    """Ask the ranks of this host that have not ended for their reports (SIGUSR2), if one has timed out; and note the
    state of those that do not answer.
    """
    if not any(report["kind"] in ("hung", "timeout") for report in failures(folder)):
        return
    silent, deadline = dict(silent_ranks(folder)), time.monotonic() + ANSWER_SECONDS
    silent = {rank: pid for rank, pid in silent.items() if _takes_reports(pid)}
    for pid in silent.values():
        with suppress(ProcessLookupError):
            os.kill(pid, REPORT)
    while time.monotonic() < deadline and any(not (folder / f"report-{rank}.json").exists() for rank in silent):
        time.sleep(LOOK_SECONDS)
    for rank, pid in silent.items():
        if not (folder / f"report-{rank}.json").exists():
            report_unresponsive(folder, rank, pid)


def _takes_reports(pid: int) -> bool:
    """Whether SIGUSR2 has a handler in a process; without one it may end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8", errors="replace")
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (REPORT - 1) & 1)


def stale() -> Iterator[Path]:
    """The folders for reports that processes left which were killed or ended by `os._exit`."""
    name = f"dtrain-{os.getuid()}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{name}*"):
        pid = folder.name.removeprefix(name).split("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            yield folder


def remove_stale() -> None:
    for folder in stale():
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _shared(folder: Path) -> Iterator[None]:
    """A context of each rank of this host that reports in a folder: the last one to leave removes it, and the folders
    of earlier starts by the same launcher with it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        with leftovers.in_use(folder):
            yield
    finally:
        of_launcher = "-".join(folder.name.split("-")[:3])
        for each in folder.parent.glob(f"{of_launcher}-*"):
            leftovers.remove_unused(each)


@contextmanager
def alone(out: str, rank: int, launcher: int | None = None) -> Iterator[None]:
    """A context in which this process reports its own failure, using the reports of the other ranks on its host. Errors
    other than DtrainError become a RankError.
    """
    remove_stale()
    siblings = (launcher or os.getppid()) if "RANK" in os.environ else os.getpid()
    restart, port = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0), os.environ.get("MASTER_PORT", "")
    folder = Path(tempfile.gettempdir(), f"dtrain-{os.getuid()}-{siblings}-{restart}-{port}")
    with _shared(folder):
        for old in folder.iterdir():
            kind, number, *_ = [*old.name.replace(".", "-").split("-"), ""]
            if kind in KINDS and number == str(rank):
                old.unlink()  # left by an earlier start from the same shell
        with _reporting(out, rank, folder):
            yield


@contextmanager
def _reporting(out: str, rank: int, folder: Path) -> Iterator[None]:
    """As `alone`, with a folder for reports."""
    os.environ[environment.REPORTS] = str(folder)
    _alone[:] = [out]
    log, before = kernel_log.KernelLog(), signal.getsignal(REPORT)
    install({REPORT: signal.SIG_IGN})  # until the watchdog takes it
    try:
        mark_started(folder, rank)
        yield
    except BaseException as error:  # torch has exceptions that do not derive from Exception
        if asked() or by_signal(error):
            raise
        try:
            report_exception(folder, rank, error)
            log_xids(folder, rank, log)
            ask_others(folder)
            failure = explain(folder)
            (folder / "printed").touch()
        except (OSError, StoreError):  # the folder for temporary files is full or gone
            failure = describe(facts_of(error, rank), [])
        with suppress(DtrainError):  # the storage may be what failed
            save(out, failure.facts)  # also of another rank, which its launcher may end before it does so
        if failure.facts["rank"] != rank:
            raise RankError(f"rank {rank} ended because of another: {failure.line}") from error
        final = error if isinstance(error, DtrainError) else RankError(failure.paragraph)
        final.facts = failure.facts
        raise final from error.__cause__ if final is error else error
    finally:
        log.close()
        install({REPORT: before})
        _alone.clear()
        os.environ.pop(environment.REPORTS, None)
