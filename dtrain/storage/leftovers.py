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
