"""Loads the files of a commit into the tensors of this rank. Every rank verifies all bytes it needs before any tensor
changes.
"""

import hashlib
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import shards
from dtrain.checkpoint.commit import DamagedError
from dtrain.checkpoint.format import Entry, parse_marked
from dtrain.errors import StoreError
from dtrain.storage import store

STREAMS = 4
"""Number of files read and verified at a time; each is in memory as a whole."""
KEPT_BYTES = 2 << 30
"""Bytes of verified files kept in memory; other files are read and verified a second time."""


class Reading:
    """Reads the commit at `url` on one rank: for each name of `wanted` the part that this rank holds."""

    def __init__(self, url: str, commit: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
        pieces: dict[str, list[Mapping[str, Any]]] = {}
        for piece in commit["pieces"]:
            pieces.setdefault(piece["name"], []).append(piece)
        self._url, self._commit, self._dtypes = (
            url,
            commit,
            {name: facts["dtype"] for name, facts in commit["tensors"].items()},
        )
        self._overlaps = {name: shards.ShardOverlap(tensor, pieces.get(name, [])) for name, tensor in wanted.items()}
        needed = {piece["file"] for overlap in self._overlaps.values() for piece, *_ in overlap.overlaps}
        self._files = [file for file in commit["files"] if file["name"] in needed]
        self._kept: dict[str, bytes] = {}

    def verify(self) -> None:
        """Read every file once and check its digest and header against the commit. Raises DamagedError, StoreError."""
        expected: dict[str, list[Mapping[str, Any]]] = {}
        for overlap in self._overlaps.values():
            for piece, *_ in overlap.overlaps:
                expected.setdefault(piece["file"], []).append(piece)
        room = KEPT_BYTES
        for file, data in _ahead(self._files, self._read):
            self._check(file["name"], parse_file(self._where(file), data, self._commit), expected[file["name"]])
            if len(data) <= room:
                self._kept[file["name"]] = data
                room -= len(data)

    def fill(self) -> None:
        """Copy the verified bytes into the tensors."""
        users: dict[str, list[tuple[shards.ShardOverlap, int, str]]] = {}
        for overlap in self._overlaps.values():
            for number, (piece, *_) in enumerate(overlap.overlaps):
                users.setdefault(piece["file"], []).append((overlap, number, piece["key"]))
        for file, data in _ahead(self._files, lambda file: self._kept.pop(file["name"], None) or self._read(file)):
            entries = parse_file(self._where(file), data, self._commit)
            for overlap, number, key in users[file["name"]]:
                overlap.fill(number, tensor_of(data, entries[key]))

    def _read(self, file: Mapping[str, Any]) -> bytes:
        """The verified bytes of a file; called in threads, so it uses no torch."""
        return read_file(self._where(file), file)

    def _where(self, file: Mapping[str, Any]) -> str:
        return store.join(self._url, file["name"])

    def _check(self, name: str, entries: Mapping[str, Entry], pieces: Iterable[Mapping[str, Any]]) -> None:
        for piece in pieces:
            entry = entries.get(piece["key"])
            if entry is None or list(entry.shape) != piece["shape"] or str(entry.dtype) != self._dtypes[piece["name"]]:
                raise DamagedError.during(
                    "load", store.join(self._url, name), f"its {piece['key'][:80]!r} does not match the commit"
                )


def read_file(where: str, file: Mapping[str, Any]) -> bytes:
    """The verified bytes of one file. Raises DamagedError, StoreError."""
    try:
        data = store.read(where)
    except StoreError as error:
        if error.kind in ("missing", "odd"):
            raise DamagedError(str(error)) from error
        raise
    if len(data) != file["size"] or hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise DamagedError.during("load", where, "its bytes are not those that were saved")
    return data


def parse_file(where: str, data: bytes, commit: Mapping[str, Any]) -> dict[str, Entry]:
    """The tensors of a file. Raises DamagedError if it is malformed, or of another step or attempt than the commit."""
    try:
        entries, mark = parse_marked(data)
    except ValueError as error:
        raise DamagedError.during("load", where, f"it is not a safetensors file ({error})") from error
    for name, value in mark.items():
        if name in commit and value != str(commit[name]):
            raise DamagedError.during(
                "load", where, f"its tensors are of {name} {value[:80]}, but the commit is of {str(commit[name])[:80]}"
            )
    return entries


def tensor_of(data: bytes, entry: Entry) -> Tensor:
    """A read-only tensor over the bytes themselves."""
    if not entry.end - entry.begin:
        return torch.empty(entry.shape, dtype=entry.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that the bytes are read-only
        flat = torch.frombuffer(data, dtype=torch.uint8, count=entry.end - entry.begin, offset=entry.begin)
    aligned = flat if flat.data_ptr() % entry.dtype.itemsize == 0 else flat.clone()
    return aligned.view(entry.dtype).view(entry.shape)


def mismatches(
    commit: Mapping[str, Any], wanted: Mapping[str, Tensor], everywhere: Iterable[str], strict: tuple[str, ...]
) -> list[str]:
    """Why a commit cannot fill `wanted`: missing names, other shapes, integers for floats, and names that begin with
    one of `strict` but are wanted on no rank (`everywhere`: the names wanted on any rank).
    """
    saved = commit["tensors"]
    missing = [name for name in wanted if name not in saved]
    extra = sorted({name for name in saved if name.startswith(strict)} - set(everywhere))
    shapes = [
        f"{name} is {saved[name]['shape']} there, {list(tensor.shape)} here"
        for name, tensor in wanted.items()
        if name in saved and saved[name]["shape"] != list(tensor.shape)
    ]
    dtypes = [
        f"{name} is {saved[name]['dtype']} there, {tensor.dtype} here"
        for name, tensor in wanted.items()
        if name in saved and ("float" in saved[name]["dtype"]) != tensor.dtype.is_floating_point
    ]
    return (
        [f"missing: {', '.join(missing[:3])}"] * bool(missing)
        + [f"left over: {', '.join(extra[:3])}"] * bool(extra)
        + shapes[:3]
        + dtypes[:3]
    )


def _ahead(files: Iterable[Mapping[str, Any]], read: Any) -> Iterator[tuple[Mapping[str, Any], bytes]]:
    """Each file with its bytes, in order, reading ahead; at most STREAMS are in memory."""
    waiting = deque[tuple[Mapping[str, Any], Future[bytes]]]()
    with ThreadPoolExecutor(STREAMS) as pool:
        try:
            for file in files:
                waiting.append((file, pool.submit(read, file)))
                if len(waiting) >= STREAMS:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
