"""Leftovers of killed processes: files that they had only begun to write, and their folders for temporary files. A
living process has a lock on its own.
"""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dtrain.storage import store

PART = "[0-9a-f]" * 8
"""End of the name of a file that is not whole yet (`disk.place`), as a pattern."""
LOCK = ".lock"
"""End of the name of a file that `alone` locks."""


def remove_parts(folder: str, names: Iterable[str]) -> None:
    """Remove what was begun of these files in a folder. Only local disks keep that."""
    if not store.is_local(folder):
        return
    place = store.local_path(folder)
    for part in (part for name in names for part in place.glob(f".{glob.escape(name)}.{PART}")):
        with suppress(OSError), part.open("r+b") as file:  # else another process writes it, or has removed it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def remove_unused(folder: Path) -> None:
    """Remove a folder unless a process has it by `in_use`."""
    with suppress(OSError):
        place = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(place)


@contextmanager
def in_use(folder: Path) -> Iterator[Path]:
    """A context in which no other process removes a folder; several may be in it."""
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_SH)
        yield folder
    finally:
        os.close(place)


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A private folder on the local disk, removed at the end; what killed processes left of the same prefix goes
    first.
    """
    for old in Path(tempfile.gettempdir()).glob(f"dtrain-{prefix}-*"):
        with suppress(OSError):  # another process may remove it at the same time
            if old.stat().st_uid == os.getuid():
                remove_unused(old)
    folder, place = _locked(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(place)


def _locked(prefix: str) -> tuple[Path, int]:
    """A new folder, and a descriptor that holds its lock. One that another process removed before it was locked is
    made again.
    """
    while True:
        folder = store.scratch(prefix)
        with suppress(FileNotFoundError):
            place = os.open(folder, os.O_RDONLY)
            fcntl.flock(place, fcntl.LOCK_SH)
            if folder.exists():
                return folder, place
            os.close(place)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """A context that one process of this user is in at a time, on this host. Its lock is a file for temporary ones that
    goes with the context; what killed processes left of such files goes first.
    """
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"dtrain-*{LOCK}"):
        with suppress(OSError), old.open("r+b") as file:  # else another process has it, or it is another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _unlink(old, file.fileno())
    path = place / f"dtrain-{os.getuid()}-{name}{LOCK}"
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if _is_at(path, handle):
            break
        os.close(handle)
    try:
        yield
    finally:
        _unlink(path, handle)
        os.close(handle)


def _is_at(path: Path, handle: int) -> bool:
    """Whether an open file is the one at this path: another process may have removed it, and made it anew."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _unlink(path: Path, handle: int) -> None:
    """Remove a file that is locked."""
    if _is_at(path, handle):
        path.unlink(missing_ok=True)
