"""The cache of a user: the folder of what is made once, and the lock of each thing that processes of one host make."""

import fcntl
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtrain.config import home
from dtrain.errors import StoreError


def folder(cache: str | None) -> Path:
    """The folder of what is made once."""
    return home.expanded(cache) if cache else home.cache() / "dtrain"


@contextmanager
def locked(stem: Path, *, seconds: float = math.inf) -> Iterator[None]:
    """A context that one process of this host has at a time. Raises StoreError, also if another one has it for longer
    than `seconds`.
    """
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        with Path(f"{stem}.lock").open("w", encoding="utf-8") as lock:
            _lock(lock.fileno(), time.monotonic() + seconds)
            yield
    except OSError as error:
        raise StoreError.during("keep the index of rows in", str(stem.parent), error.strerror or error) from error


def _lock(file: int, deadline: float) -> None:
    """Raises BlockingIOError at the deadline."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
