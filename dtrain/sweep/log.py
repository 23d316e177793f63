"""The output of a job: read from a pipe, shortened in the middle, masked, and written to its log.txt."""

import os
import time
from pathlib import Path

from dtrain import secrets
from dtrain.errors import StoreError
from dtrain.storage import store

HEAD, TAIL = 256 << 10, 768 << 10
"""Bytes that are kept of the beginning and of the end."""
CHUNK = 1 << 16
NEAR = 1 << 12
"""Bytes in which the newest line is looked for."""
PUBLISH_SECONDS = 10.0
"""The file is written at most this often, and at the end."""


class Log:
    """A named pipe at `path`, which the job writes to; its text goes to `url`."""

    def __init__(self, path: Path, url: str) -> None:
        os.mkfifo(path, 0o600)
        self._url, self._descriptor = url, os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._head, self._tail, self._dropped = b"", bytearray(), 0
        self._written, self._dirty = time.monotonic(), False

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> bool:
        """Read what there is; False when every writer has gone."""
        try:
            data = os.read(self._descriptor, CHUNK)
        except BlockingIOError:
            return True
        self._dirty = self._dirty or bool(data)
        room = HEAD - len(self._head)
        self._head, rest = self._head + data[:room], data[room:]
        self._tail += rest
        if len(self._tail) > 2 * TAIL:
            self._dropped += len(self._tail) - TAIL
            del self._tail[:-TAIL]
        return bool(data)

    def newest(self, begin: bytes) -> str:
        """The newest whole line that begins with `begin`; empty if there is none near the end of the output."""
        lines = bytes((self._tail or self._head)[-NEAR:]).split(b"\n")[:-1]
        return next((line.decode(errors="replace") for line in reversed(lines) if line.startswith(begin)), "")

    def publish(self) -> None:
        """Write the file, unless it was written a moment ago or nothing is new."""
        if self._dirty and time.monotonic() - self._written > PUBLISH_SECONDS:
            self._write()

    def close(self, *, keep: bool) -> None:
        """Read the rest; write it if it is to be kept."""
        while self._descriptor >= 0 and self.read():
            if self._is_empty():
                break
        os.close(self._descriptor)
        self._descriptor = -1
        if keep and self._dirty:
            self._write()

    def _is_empty(self) -> bool:
        """Whether a read would wait, since somebody holds the pipe open."""
        import select

        return not select.select([self._descriptor], [], [], 0)[0]

    def _write(self) -> None:
        gap = f"\n... {self._dropped:,} bytes are left out ...\n".encode() if self._dropped else b""
        text = secrets.masked((self._head + gap + self._tail).decode(errors="replace"))
        self._written, self._dirty = time.monotonic(), False
        try:
            store.write(self._url, text.encode())
        except StoreError:  # the run itself tells of its storage
            self._dirty = True
