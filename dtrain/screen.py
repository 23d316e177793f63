"""What is printed outlives its reader: a pipe whose other end has gone, a closed terminal, or a disk that is full by now ends no run.

python -m dtrain | head
"""

import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_full: list[OSError] = []


class _Screen(io.FileIO):
    """A file descriptor; from the write on that nobody can read, what is written to it is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno in FULL:  # there may be room again
                _full[:] = [error]
                return len(memoryview(data).cast("B"))
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(memoryview(data).cast("B"))


def full() -> OSError | None:
    """Why something that was printed is lost: a disk without room."""
    return _full[0] if _full else None


def outlive_readers() -> None:
    """From now on, for what this process prints and those that it forks. What was closed when it began is the null device."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            _fill(number)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - it stays open as long as the process
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper):
            old.flush()
            raw = io.BufferedWriter(_Screen(old.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=old.line_buffering or name == "stderr"))


def _fill(number: int) -> None:
    """Open the null device as this descriptor, unless something else was opened as it since."""
    try:
        os.fstat(number)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
