"""JSON lines under `out`: appended on a local disk; on storage that cannot append, kept in a local file and uploaded
whole.

Storage that cannot be written (full, read-only, gone) stops nothing: rows stay in memory, up to `KEPT_BYTES`, and are
written as soon as it works again. A file that was removed, rotated or truncated, or replaced because other storage was
mounted there, is rebuilt from the rows in memory plus the older rows that the file still has.
"""

import errno
import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtrain.config import environment
from dtrain.errors import LeaseError, MovedError, StoreError
from dtrain.secrets.as_json import clean
from dtrain.storage import lease, store
from dtrain.storage.disk import a_file, place
from dtrain.storage.errors import explain

PUT_SECONDS = 15.0
"""Remote journals are uploaded at most this often, and at the end."""
KEPT_BYTES = 32 << 20
"""The newest rows stay in memory up to this size, about 150,000 rows, written or not; if even more rows could not be
written, the oldest are lost.
"""


class Journal:
    """One file of rows. Only rank 0 has one. Numbers without a JSON form (nan, inf) become null. `by_step`: each row
    has a step, and no two rows the same.

    `check` is called before rows are written to a file other than the previous one; if it raises, nothing is written,
    and the caller gets the exception.
    """

    def __init__(self, url: str, *, by_step: bool = False, check: Callable[[], object] = lambda: None) -> None:
        self.url, self.name, self._by_step, self._check = url, url.rsplit("/", 1)[-1], by_step, check
        self.warnings: list[str] = []
        """A sentence for each failure or recovery; the caller shows and removes them."""
        self._scratch: Path | None = None
        if store.is_local(url):
            self._path = store.local_path(url)
        else:
            self._scratch = store.scratch("journal", inside=os.environ.get(environment.REPORTS))
            self._path = self._scratch / "rows.jsonl"
        self.path = self._path
        """The local file, which others may read."""
        self._put, self._dirty = time.monotonic(), False
        self._writing, self._putting = threading.Lock(), threading.Lock()
        self._lines, self._bytes, self._unwritten, self._lost = deque[bytes](), 0, 0, 0
        self._file, self._size, self._torn, self._stale = -1, 0, False, False
        self._trouble = ""
        self._wanted: Callable[[dict[str, Any]], bool] = lambda row: True
        self._identity: tuple[int, int] | None = None
        """Device and inode of the file with the rows."""
        if self._scratch is not None and store.exists(url):
            self._path.write_bytes(store.read(url))
        self._load()

    def append(self, *rows: Mapping[str, Any]) -> None:
        with self._writing:
            self._remember([(json.dumps(clean(row)) + "\n").encode() for row in rows], new=True)
            self._dirty = True
            with suppress(OSError):  # noted in `warnings`, and retried with the next row
                self._write()
        if self._scratch is not None and time.monotonic() - self._put > PUT_SECONDS:
            self._put = time.monotonic()
            threading.Thread(target=self._put_quietly, name="dtrain-journal", daemon=True).start()

    def widen(self, columns: Mapping[str, Any]) -> None:
        """Add columns to the newest row. Other columns of it stay whole in the file, whenever the process is killed."""
        with self._writing:
            line = self._lines.pop()
            more = b", " + json.dumps(clean(columns)).encode().removeprefix(b"{") + b"\n"
            self._lines.append(line.removesuffix(b"}\n") + more)
            self._bytes += len(self._lines[-1]) - len(line)
            self._dirty = True
            if not self._unwritten:
                self._stale = not (self._is_whole() and self._overwrite(more, self._size - len(b"}\n")))
            with suppress(OSError):  # as in `append`
                self._write()

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Drop the rows that are not `wanted`, because their steps will be repeated, and everything after a line that
        is not JSON. Returns the rows that stay.
        """
        with self._writing:
            self._wanted = wanted
            with suppress(OSError):
                self._verify()
            rows = list[tuple[bytes, dict[str, Any]]]()
            for line in self._all():
                row = _row(line)
                if row is None:  # after a power cut; durable rows are before it
                    break
                if wanted(row):
                    rows.append((line, row))
            if self._by_step:
                of_step = {row["step"]: (line, row) for line, row in rows}
                rows = [of_step[step] for step in sorted(of_step)]
            self._lines, self._bytes, self._unwritten = deque(), 0, 0
            self._remember([line for line, _ in rows], new=False)
            self._stale = self._dirty = True
            with suppress(OSError):
                self._write([line for line, _ in rows])
        return [row for _, row in rows]

    def rows(self) -> list[dict[str, Any]]:
        """Every row that can be read."""
        with self._writing:
            return [row for line in self._all() if (row := _row(line)) is not None]

    def durable(self) -> None:
        """Make the rows appended so far durable and visible to others, whatever is killed afterwards; any thread may
        call it. Raises StoreError.
        """
        with self._putting:  # an upload must not overtake one with more rows
            with self._writing:
                if not self._dirty and self._is_whole():
                    return
                try:
                    self._write()
                    data, self._dirty = self._path.read_bytes() if self._scratch is not None else b"", False
                except OSError as error:
                    raise StoreError.during("write", self.url, error.strerror or error) from error
            try:
                if self._scratch is not None:
                    lease.verify(self.url.rsplit("/", 1)[0])  # the file may belong to a run that took over
                    store.write(self.url, data)
                else:
                    store.fsync(self._path)
                    store.sync_folder(str(self._path.parent))
            except (OSError, StoreError) as error:
                self._dirty = True
                self._stale = self._scratch is None  # after a failed sync, the contents of the file are unknown
                if isinstance(error, LeaseError):
                    raise
                self._failed(error)
                if isinstance(error, StoreError):
                    raise
                raise StoreError.during("sync", self.url, error.strerror or error) from error
            self._recovered()

    def close(self) -> None:
        """Raises StoreError when the newest rows could not be written."""
        try:
            self.durable()
        finally:
            self._close_file()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _put_quietly(self) -> None:
        with suppress(StoreError):  # `durable` has noted it in `warnings`
            self.durable()

    # the local file

    def _load(self) -> None:
        """Read the rows of an earlier run, except an incomplete last line."""
        with suppress(OSError):
            with a_file(self._path).open("rb") as file:
                self._identity, data = _identity(os.fstat(file.fileno())), file.read()
            self._size = data.rfind(b"\n") + 1
            self._torn = self._size != len(data)
            self._remember(data[: self._size].splitlines(keepends=True), new=False)
        with suppress(OSError):
            self._write()

    def _remember(self, lines: Iterable[bytes], *, new: bool) -> None:
        for line in lines:
            self._lines.append(line)
            self._bytes += len(line)
            self._unwritten += new
        while self._bytes > KEPT_BYTES and len(self._lines) > 1:
            self._bytes -= len(self._lines.popleft())
            if self._unwritten > len(self._lines):
                self._unwritten, self._lost = len(self._lines), self._lost + 1

    def _is_whole(self) -> bool:
        """Whether the file at the path is the open one and has not become shorter."""
        if self._file < 0 or self._stale:
            return False
        with suppress(OSError):
            same = _identity(self._path.stat()) == self._identity
            return same and os.fstat(self._file).st_size >= self._size
        return False

    def _write(self, lines: Iterable[bytes] | None = None) -> None:
        """Write the missing rows, or replace the file by `lines`; rebuild it if it has become shorter. Raises
        OSError.
        """
        try:
            if lines is not None:
                self._replace(lines)
            elif not self._is_whole():
                self._open()
            self._append()
        except OSError as error:
            self._close_file()
            self._failed(error)
            raise
        if self._scratch is None:
            self._recovered()

    def _failed(self, error: Exception) -> None:
        if not self._trouble:
            self._trouble = str(error) if isinstance(error, StoreError) else explain(error, str(self._path)).sentence
            self.warnings.append(
                f"{self.name} cannot be written, training goes on: {self._trouble}. Its newest rows, up to "
                f"{KEPT_BYTES >> 20} MiB, are kept in memory and written when that is possible again"
            )

    def _recovered(self) -> None:
        if self._trouble:
            lost = f"; the oldest {self._lost} rows of that time are lost" if self._lost else ""
            self.warnings.append(f"{self.name} is written again{lost}")
            self._trouble, self._lost = "", 0

    def _open(self) -> None:
        """Open the file at the path, which may be another one than before; rebuild it from the rows in memory if it is
        shorter than what was written.
        """
        self._close_file()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        size = 0
        with suppress(FileNotFoundError):
            self._file = os.open(a_file(self._path), os.O_WRONLY | os.O_APPEND)
            size = os.fstat(self._file).st_size
        if self._stale or size < self._size or self._file < 0 or _identity(os.fstat(self._file)) != self._identity:
            self._verify()
            lines = self._merged(self._read())
            if size < self._size and not self._stale:
                since = f", from step {_step(lines[0])} on" if lines and _step(lines[0]) < math.inf else ""
                self.warnings.append(
                    f"{self.name} was removed or cut: it is made again from the {len(lines)} rows in memory{since}"
                )
            self._replace(lines)

    def _merged(self, there: list[bytes]) -> list[bytes]:
        """The rows to keep of the file at the path, and those in memory."""
        if self._by_step:
            rows = {_step(line): line for line in there if self._wanted(_row(line) or {})}
            rows |= {_step(line): line for line in self._lines}
            return [rows[step] for step in sorted(rows)]
        known = set(self._lines)
        return [*(line for line in there if line not in known), *self._lines]

    def _replace(self, lines: Iterable[bytes]) -> None:
        data = b"".join(lines)
        place(store.disk, self._path, data, store.disk.replace)
        self._close_file()
        self._size, self._torn, self._stale, self._unwritten = len(data), False, False, 0
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._identity = _identity(os.fstat(self._file))

    def _verify(self) -> None:
        """Raises LeaseError if a local `out` no longer belongs to this run, and whatever `check` raises; OSError if
        that is unknown.
        """
        if self._scratch is None:
            try:
                lease.verify(str(self._path.parent))
                self._check()
            except (LeaseError, MovedError):
                raise
            except StoreError as error:
                raise OSError(errno.EIO, str(error)) from error

    def _append(self) -> None:
        if self._torn:
            os.ftruncate(self._file, self._size)
        size = os.fstat(self._file).st_size
        data = b"".join(self._lines[index] for index in range(-self._unwritten, 0))
        self._size, self._torn, view = size, True, memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._size, self._torn, self._unwritten = size + len(data), False, 0

    def _overwrite(self, data: bytes, begin: int) -> bool:
        """Replace the end of the file in one call. Returns whether that succeeded."""
        with suppress(OSError):
            file = os.open(a_file(self._path), os.O_WRONLY)  # where O_APPEND is set, Linux appends whatever the offset
            try:
                written = os.pwrite(file, data, begin)
            finally:
                os.close(file)
            self._size = begin + written
            return written == len(data)
        return False

    def _all(self) -> list[bytes]:
        """Every row: from the file if it can be written, otherwise those in memory."""
        with suppress(OSError):
            self._write()
            return self._read()
        return list(self._lines)

    def _read(self) -> list[bytes]:
        with suppress(OSError):
            return [line for line in a_file(self._path).read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        return []

    def _close_file(self) -> None:
        if self._file >= 0:
            with suppress(OSError):
                os.close(self._file)
            self._file = -1


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Device and inode of a file."""
    return status.st_dev, status.st_ino


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None if it is not one."""
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
    return None


def _step(line: bytes) -> float:
    """The step of a row; infinity if it has none."""
    step = (_row(line) or {}).get("step")
    return step if type(step) is int else math.inf
