"""What is printed outlives its reader: a pipe whose other end has gone, or a closed terminal, ends no run.

python -m dtrain | head
"""

import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO)


class _Screen(io.FileIO):
    """A file descriptor; from the write on that nobody can read, what is written to it is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(memoryview(data).cast("B"))


def outlive_readers() -> None:
    """From now on, for what this process prints and those that it forks."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper):
            old.flush()
            raw = io.BufferedWriter(_Screen(old.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=old.line_buffering or name == "stderr"))
