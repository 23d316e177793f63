"""A process that no launcher of ours watches tells its own failure."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from dtrain.config import environment
from dtrain.errors import DtrainError, RankError, StoreError
from dtrain.lifecycle import kernel_log
from dtrain.lifecycle.failure import KINDS, began, explain, facts_of, heard, leave, save, tell, told
from dtrain.lifecycle.signals import asked, by_signal
from dtrain.secrets import screen
from dtrain.storage import lease, store

GIVE_UP_SECONDS = 5.0
"""Storage that does not answer holds no process back that gives up."""


_alone: list[str] = []
"""`out`, where nobody else tells what went wrong."""


def is_watched() -> bool:
    """Whether somebody else tells what this process leaves."""
    return not _alone


def give_up(
    folder: Path | None, rank: int, message: str, *, kind: str = "hung", exit_code: int = 1, **facts: Any
) -> NoReturn:
    """End a process that cannot go on, from any of its threads: what it would have said is left, and where no launcher
    reads it, told here by one rank of the host; a lease that it holds is given back. `kind` lost: something that is no
    rank is the cause.
    """
    with suppress(Exception), store.patience(GIVE_UP_SECONDS):  # it ends, whatever fails here
        if folder:
            tell(folder, None if kind == "lost" else rank, kind, message, **facts)
            if _alone and _first(folder):
                failure = explain(folder)
                screen.complain(failure.paragraph)
                save(_alone[0], failure.facts)
    with suppress(Exception), store.patience(GIVE_UP_SECONDS):
        lease.give_back()
    os._exit(exit_code)


def _first(folder: Path) -> bool:
    """Whether nobody else of this host has told already."""
    try:
        (folder / "told").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@contextmanager
def alone(out: str, rank: int, launcher: int | None = None) -> Iterator[None]:
    """Inside, this process tells its own failure, and knows what the other ranks of its host left. What is no
    DtrainError becomes a RankError.
    """
    siblings = (launcher or os.getppid()) if "RANK" in os.environ else os.getpid()
    place, name = Path(tempfile.gettempdir()), f"dtrain-{os.getuid()}"
    for stale in place.glob(f"{name}-*-*"):
        if not Path(f"/proc/{stale.name.split('-')[2]}").exists():  # of ranks that were killed
            shutil.rmtree(stale, ignore_errors=True)
    folder = (
        place
        / f"{name}-{siblings}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-{os.environ.get('MASTER_PORT', '')}"
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    for old in (
        path for kind in KINDS for path in (*folder.glob(f"{kind}-{rank}"), *folder.glob(f"{kind}-{rank}[.-]*"))
    ):
        old.unlink()  # of an earlier start by the same shell
    os.environ[environment.REPORTS] = str(folder)
    _alone[:] = [out]
    log = kernel_log.KernelLog()
    try:
        began(folder, rank)
        yield
    except BaseException as error:  # torch has exceptions that are no Exception
        if asked() or by_signal(error):
            raise
        try:
            leave(folder, rank, error)
            heard(folder, rank, log)
            failure = explain(folder)
        except (OSError, StoreError):  # the folder for temporary files is full or gone
            failure = told(facts_of(error, rank), [])
        if failure.facts["rank"] != rank:
            raise RankError(f"rank {rank} ended because of another: {failure.line}") from error
        with suppress(DtrainError):  # the storage may be what failed
            save(out, failure.facts)
        final = error if isinstance(error, DtrainError) else RankError(failure.paragraph)
        final.facts = failure.facts
        raise final from error.__cause__ if final is error else error
    finally:
        log.close()
        _alone.clear()
        os.environ.pop(environment.REPORTS, None)
        if "RANK" not in os.environ:  # else the others may have to read it
            shutil.rmtree(folder, ignore_errors=True)
