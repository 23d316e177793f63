"""flaky://<scheme>/<path>: another fsspec filesystem, with faults. flaky://s3/bucket/run is s3://bucket/run,
flaky://file//data/run is /data/run.

python -m dtrain out=flaky://file//data/run out_options.share=0.2 out_options.kinds=[503,timeout] out_options.seed=1
DTRAIN_FLAKY="share=0.2 kinds=503,timeout seed=1" python -m dtrain out=flaky://s3/bucket/run

Whether an operation fails, and how, depends only on the seed, the rank and the number of operations that this process
has done, so faults are reproducible.
"""

import contextlib
import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fsspec.spec import AbstractFileSystem

from dtrain.config import environment
from dtrain.storage import store
from dtrain.testing.faults import Crash


class AnswerError(OSError):
    """An HTTP error status from a server."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the server answered {status}")
        self.status = status


def _system_error(name: str) -> OSError:
    return OSError(getattr(errno, name), os.strerror(getattr(errno, name)))


ERRORS: dict[str, Callable[[], Exception]] = {
    "timeout": lambda: TimeoutError("the server did not answer in time"),
    "cut": lambda: ConnectionResetError(errno.ECONNRESET, "the connection was cut"),
    **{str(status): partial(AnswerError, status) for status in (401, 403, 404, 429, 500, 502, 503, 504)},
    **{name: partial(_system_error, name) for name in ("EIO", "ENOSPC", "EDQUOT", "EROFS")},
}
"""Errors that are raised instead of the operation."""
KINDS = (*ERRORS, "unanswered", "delay", "hang", "kill", "crash", "partial", "torn", "short", "flip", "unsynced")
"""
unanswered  done, but a timeout is raised              partial   a put writes its first half, and the connection is cut
delay       done `delay` seconds later                 torn      a put writes its first half, and the process crashes
hang        never returns                              short     a put writes its first half, without an error
kill        SIGKILL instead of the operation           flip      one bit of a put or a read is flipped
crash       faults.Crash, now and ever after           unsynced  only this process sees the put, until `cut_power`
"""
PUT_KINDS = ("partial", "torn", "short", "unsynced")
OPERATIONS = ("put", "get", "look", "remove")


class FlakyFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A fraction `share` of the operations fails, each in one of the `kinds`; with `at`, only the `at`-th (from 0).
    `on`: the operations that may fail, and count.

    `options` are those of the filesystem below. DTRAIN_FLAKY gives the defaults.
    """

    protocol = "flaky"
    cachable = False

    def __init__(self, options: Mapping[str, Any] | None = None, **given: Any) -> None:
        super().__init__(use_listings_cache=False)
        known = ("share", "kinds", "at", "on", "seed", "delay")
        faults = _environment() | {name: value for name, value in given.items() if name in known}
        self.share, self.delay = float(faults.get("share", 0)), float(faults.get("delay", 1))
        self.seed = int(faults.get("seed", 0))
        self.at = None if faults.get("at") is None else int(faults["at"])
        self.kinds = _words(faults.get("kinds", ("503", "timeout", "cut")), KINDS)
        self.on = _words(faults.get("on", OPERATIONS), OPERATIONS)
        self.operations = list[str]()
        """Operations so far that are in `on`, such as `put file//run/a`."""
        self._options = dict(options or {})
        self._below = dict[str, Any]()
        self._unsynced = dict[str, bytes]()
        self._lock, self._dead = threading.Lock(), False

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        fault, fs, below = self._begin("put", path)
        data = bytes(value)
        if mode == "create" and path in self._unsynced:
            raise FileExistsError(path)
        if fault == "unsynced":
            self._unsynced[path] = data
            return
        if fault in ("partial", "torn", "short"):
            data = data[: len(data) // 2]
        if fault == "flip" and data:
            data = self._flipped(data)
        if path.startswith("file/"):
            fs.makedirs(fs._parent(below), exist_ok=True)
        fs.pipe_file(below, data, mode=mode)
        self._unsynced.pop(path, None)
        self._end(fault)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        fault, fs, below = self._begin("get", path)
        data = (
            self._unsynced[path][start:end]
            if path in self._unsynced
            else bytes(fs.cat_file(below, start=start, end=end))
        )
        self._end(fault)
        return self._flipped(data) if fault == "flip" and data else data

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        with open(lpath, "rb") as file:  # noqa: PTH123 - a name, as fsspec has it
            self.pipe_file(self._strip_protocol(rpath), file.read())

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        data = self.cat_file(self._strip_protocol(rpath))
        with open(lpath, "wb") as file:  # noqa: PTH123 - a name, as fsspec has it
            file.write(data)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        fault, fs, below = self._begin("look", path)
        mine = self._unsynced.get(path)
        entry = self._outer(path, fs.info(below)) if mine is None else {"name": path, "size": len(mine), "type": "file"}
        self._end(fault)
        return entry

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        fault, fs, below = self._begin("look", path)
        entries = dict[str, dict[str, Any]]()
        with contextlib.suppress(FileNotFoundError):
            entries = {
                entry["name"]: entry for entry in (self._outer(path, entry) for entry in fs.ls(below, detail=True))
            }
        for name, data in self._unsynced.items():
            if name.startswith(f"{path}/"):
                first, below_it, _rest = name.removeprefix(f"{path}/").partition("/")
                kind, size = ("directory", 0) if below_it else ("file", len(data))
                entries[f"{path}/{first}"] = {"name": f"{path}/{first}", "size": size, "type": kind}
        if not entries:
            raise FileNotFoundError(path)
        self._end(fault)
        return list(entries.values()) if detail else list(entries)

    def rm_file(self, path: str) -> None:
        fault, fs, below = self._begin("remove", path)
        if self._unsynced.pop(path, None) is None:
            fs.rm_file(below)
        self._end(fault)

    def rmdir(self, path: str) -> None:
        fault, fs, below = self._begin("remove", path)
        with contextlib.suppress(FileNotFoundError, NotImplementedError):
            fs.rmdir(below)
        self._end(fault)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        for name in reversed(self.expand_path(self._strip_protocol(path), recursive=recursive, maxdepth=maxdepth)):
            (self.rmdir if self.isdir(name) else self.rm_file)(name)

    def exists(self, path: str, **_: Any) -> bool:
        return self._type(path) != ""

    def isdir(self, path: str) -> bool:
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        return self._type(path) == "file"

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **_: Any
    ) -> Any:
        """Like fsspec's `find`, but an error of listing a folder is raised, not ignored."""
        path = self._strip_protocol(path)
        if self.isfile(path):
            entries: dict[str, dict[str, Any]] = {path: {"name": path, "type": "file"}}
        else:
            entries = dict(self._walk(path, maxdepth, withdirs))
        return dict(sorted(entries.items())) if detail else sorted(entries)

    def ukey(self, path: str) -> str:
        fault, fs, below = self._begin("look", path)
        key = str(fs.ukey(below))
        self._end(fault)
        return key

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        fault, fs, below = self._begin("get" if "r" in mode else "put", path)
        self._end(fault)
        return fs.open(below, mode=mode, **more)

    def _type(self, path: str) -> str:
        try:
            return str(self.info(path)["type"])
        except FileNotFoundError:
            return ""

    def _walk(self, path: str, depth: int | None, withdirs: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        with contextlib.suppress(FileNotFoundError):
            for entry in self.ls(path):
                if entry["type"] == "file" or withdirs:
                    yield entry["name"], entry
                if entry["type"] == "directory" and depth != 1:
                    yield from self._walk(entry["name"], depth and depth - 1, withdirs)

    def cut_power(self) -> None:
        """Drop the files that were put, but not synced."""
        self._unsynced.clear()

    def _begin(self, operation: str, path: str) -> tuple[str, Any, str]:
        """(the fault that remains to be injected, the filesystem below, the path there)"""
        fault = self._fault(operation, path)
        if fault == "delay":
            time.sleep(self.delay)
        elif fault == "hang":
            threading.Event().wait()
        elif fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "crash":
            raise Crash(f"at operation {len(self.operations) - 1}: {self.operations[-1]}")
        elif fault in ERRORS:
            raise ERRORS[fault]()
        scheme, _, below = path.partition("/")
        with self._lock:
            if scheme not in self._below:
                self._below[scheme] = store.connect(f"{scheme}://{below}", self._options)
        return fault, self._below[scheme], self._below[scheme]._strip_protocol(f"{scheme}://{below}")

    def _fault(self, operation: str, path: str) -> str:
        if operation not in self.on:
            return ""
        with self._lock:
            if self._dead:
                return "crash"
            self.operations.append(f"{operation} {path}")
            count = len(self.operations) - 1
            chance = random.Random(f"{self.seed} {os.environ.get('RANK', '0')} {count}")
            kinds = [kind for kind in self.kinds if operation == "put" or kind not in PUT_KINDS]
            struck = count == self.at if self.at is not None else chance.random() < self.share
            fault = chance.choice(kinds) if struck and kinds else ""
            self._dead = fault in ("crash", "torn")
            return fault

    def _end(self, fault: str) -> None:
        if fault == "unanswered":
            raise ERRORS["timeout"]()
        if fault == "partial":
            raise ERRORS["cut"]()
        if fault == "torn":
            raise Crash(f"in operation {len(self.operations) - 1}: {self.operations[-1]}")

    def _flipped(self, data: bytes) -> bytes:
        bit = random.Random(f"{self.seed} {len(self.operations)}").randrange(8 * len(data))
        return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]

    def _outer(self, path: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        scheme = path.partition("/")[0]
        return {**entry, "name": f"{scheme}/{entry['name'] if scheme == 'file' else entry['name'].lstrip('/')}"}


def _words(value: Any, allowed: Sequence[str]) -> tuple[str, ...]:
    words = tuple(str(value).split(",")) if isinstance(value, str | int) else tuple(map(str, value))
    if unknown := set(words) - set(allowed):
        raise ValueError(f"there is no {', '.join(sorted(unknown))}. Allowed: {', '.join(allowed)}")
    return words


def _environment() -> dict[str, str]:
    return dict(word.split("=", 1) for word in os.environ.get(environment.FLAKY, "").split())
