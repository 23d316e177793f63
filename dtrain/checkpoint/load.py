"""Loads the files of a commit into the tensors of this rank. Every rank verifies all bytes it needs before any tensor
changes.
"""

import hashlib
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import shards
from dtrain.checkpoint.commit import DamagedError
from dtrain.checkpoint.format import Entry, parse
from dtrain.errors import StoreError
from dtrain.storage import store

STREAMS = 4
"""Number of files read and verified at a time; each is in memory as a whole."""
KEPT_BYTES = 2 << 30
"""Bytes of verified files kept in memory; other files are read and verified a second time."""


class Reading:
    """Reads the commit at `url` on one rank: for each name of `wanted` the part that this rank holds. `packs`: names
    without memory of their own -> who takes the whole tensor.
    """

    def __init__(
        self, url: str, commit: Mapping[str, Any], wanted: Mapping[str, Tensor],
        packs: Mapping[str, Callable[[Tensor], None]] | None = None,
    ) -> None:  # fmt: skip
        self._url, self._commit, pieces = url, commit, shards.grouped(commit["pieces"], "name")
        self._overlaps = [shards.ShardOverlap(tensor, pieces[name]) for name, tensor in wanted.items()]
        self._packs = dict[shards.ShardOverlap, Callable[[Tensor], None]]()
        for name, overlap in zip(wanted, self._overlaps, strict=True):
            if packs and name in packs:
                self._packs[overlap] = packs[name]
        needed = (piece for overlap in self._overlaps for piece, *_ in overlap.overlaps)
        self._pieces = shards.grouped(needed, "file")
        self._files = [file for file in commit["files"] if file["name"] in self._pieces]
        self._verified: dict[str, bytes] = {}

    def verify(self) -> None:
        """Read every file once and check its digest and header against the commit. Raises DamagedError, StoreError."""
        room = KEPT_BYTES
        for file, data in _ahead(self._files, self._read):
            parse_file(self._where(file), data, self._commit, self._pieces[file["name"]])
            if len(data) <= room:
                self._verified[file["name"]] = data
                room -= len(data)

    def fill(self) -> None:
        """Copy the verified bytes into the tensors."""
        users: dict[str, list[tuple[shards.ShardOverlap, int, str]]] = {}
        left = dict[shards.ShardOverlap, int]()
        for overlap in self._overlaps:
            for number, (piece, *_) in enumerate(overlap.overlaps):
                users.setdefault(piece["file"], []).append((overlap, number, piece["key"]))
        for file, data in _ahead(self._files, lambda file: self._verified.pop(file["name"], None) or self._read(file)):
            entries = parse_file(self._where(file), data, self._commit)
            for overlap, number, key in users[file["name"]]:
                if overlap in self._packs:
                    left[overlap] = left.get(overlap, len(overlap.overlaps)) - 1
                    self._fill_packed(overlap, number, tensor_of(data, entries[key]), is_last=not left[overlap])
                else:
                    overlap.fill(number, tensor_of(data, entries[key]))

    def _fill_packed(self, overlap: shards.ShardOverlap, number: int, value: Tensor, *, is_last: bool) -> None:
        """Give a tensor without memory some, until it is whole."""
        empty = overlap.memory.to("meta")
        if overlap.memory.is_meta:
            overlap.memory = torch.empty_like(empty, device="cpu")
        overlap.fill(number, value)
        if is_last:
            self._packs[overlap](overlap.memory)
            overlap.memory = empty

    def _read(self, file: Mapping[str, Any]) -> bytes:
        """The verified bytes of a file; called in threads, so it uses no torch."""
        return read_file(self._where(file), file)

    def _where(self, file: Mapping[str, Any]) -> str:
        return store.join(self._url, file["name"])


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


def parse_file(
    where: str, data: bytes, commit: Mapping[str, Any], pieces: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Entry]:
    """The tensors of a file. Raises DamagedError if it is malformed, of another step or attempt than the commit, or
    does not have these `pieces` of the commit.
    """
    try:
        entries, mark = parse(data)
    except ValueError as error:
        raise DamagedError.during("load", where, f"it is not a safetensors file ({error})") from error
    for name, value in mark.items():
        if name in commit and value != str(commit[name]):
            raise DamagedError.during(
                "load", where, f"its tensors are of {name} {value[:80]}, but the commit is of {str(commit[name])[:80]}"
            )
    for piece in pieces:
        entry, dtype = entries.get(piece["key"]), commit["tensors"][piece["name"]]["dtype"]
        if entry is None or list(entry.shape) != piece["shape"] or str(entry.dtype) != dtype:
            raise DamagedError.during("load", where, f"its {piece['key'][:80]!r} does not match the commit")
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
    saved, shapes, dtypes, missing = commit["tensors"], list[str](), list[str](), list[str]()
    for name, tensor in wanted.items():
        if name not in saved:
            missing.append(name)
            continue
        shape, dtype = saved[name]["shape"], saved[name]["dtype"]
        if shape != list(tensor.shape):
            shapes.append(f"{name} is {shape} there, {list(tensor.shape)} here")
        if ("float" in dtype) != tensor.dtype.is_floating_point:
            dtypes.append(f"{name} is {dtype} there, {tensor.dtype} here")
    extra = sorted({name for name in saved if name.startswith(strict)} - set(everywhere))
    names = {"missing": missing, "left over": extra}
    return [f"{what}: {', '.join(some[:3])}" for what, some in names.items() if some] + shapes[:3] + dtypes[:3]


def _ahead(files: Iterable[Mapping[str, Any]], read: Any) -> Iterator[tuple[Mapping[str, Any], bytes]]:
    """Each file with its bytes, in order, reading ahead; at most STREAMS are in memory."""
    remaining, waiting = iter(files), deque[tuple[Mapping[str, Any], Future[bytes]]]()
    with ThreadPoolExecutor(STREAMS) as pool:
        try:
            while True:
                for file in itertools.islice(remaining, STREAMS - len(waiting)):
                    waiting.append((file, pool.submit(read, file)))
                if not waiting:
                    return
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            pool.shutdown(cancel_futures=True)
