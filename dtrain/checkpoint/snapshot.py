"""A copy of the shards that this rank writes, laid out like the files, in memory that every save reuses. The loop waits
only for this copy.
"""

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import shards
from dtrain.checkpoint.format import NAMES, Entry, header
from dtrain.errors import StoreError
from dtrain.mesh.sharding import local

FILE_BYTES = 64 << 20
"""Largest size of a file, unless a single row is larger."""
ALIGN = 4096


@dataclass(frozen=True)
class Piece:
    """A piece of a tensor: `rows` [first, last) of this rank's part; None: all of it. `key`: its name in the file."""

    name: str
    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[int, int] | None

    @property
    def place(self) -> dict[str, list[int]]:
        """Its position in the whole tensor."""
        return {"shape": list(self.shape), "offset": list(self.offset)}

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, part: Tensor) -> Tensor:
        return part[self.rows[0] : self.rows[1]] if self.rows else part


@dataclass(frozen=True)
class File:
    """A file to write. `parts`: its header and its data; the data is at `begin` of the reused memory, and the next
    snapshot overwrites it. `mark`: its metadata, the step and attempt.
    """

    name: str
    begin: int
    entries: Mapping[str, Entry]
    data: memoryview
    pieces: tuple[Piece, ...]
    mark: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def parts(self) -> tuple[bytes, memoryview]:
        return header(self.entries, self.mark), self.data

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))

    def manifest(self) -> list[dict[str, Any]]:
        """The pieces in it, as a commit lists them."""
        return [{"name": one.name, "key": one.key, "file": self.name, **one.place} for one in self.pieces]


class Snapshot:
    """The snapshot of one rank. `coords`: `Mesh.replica_coords`. `room(bytes)`: allocates the memory, instead of the
    process's own.
    """

    def __init__(self, rank: int, coords: Mapping[str, int], room: Callable[[int], Tensor] | None = None) -> None:
        self._rank, self._coords, self._room = rank, coords, room
        self._signature: object = None
        self._copied: torch.Event | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._targets: list[Tensor] = []
        self._files: list[File] = []

    def take(self, tensors: Mapping[str, Tensor]) -> list[File]:
        """Copy the shards that this rank writes; call `wait` before reading them. Nothing is allocated while names,
        shapes and types stay the same.

        A GPU copies in stream order, before the loop's next kernels, so that the loop need not wait.
        """
        signature = [(name, one.shape, one.dtype, getattr(one, "placements", None)) for name, one in tensors.items()]
        if signature != self._signature:
            self._lay_out(tensors)
            self._signature = signature
        pieces = [piece for file in self._files for piece in file.pieces]
        parts = {name: local(tensors[name]) for name in {piece.name for piece in pieces}}
        sources = [piece.of(parts[piece.name]) for piece in pieces]
        if sources:
            with torch.no_grad():
                torch._foreach_copy_(self._targets, sources, non_blocking=True)
            device = next((source.device for source in sources if source.device.type != "cpu"), None)
            if device is not None:
                self._copied = torch.Event(device)
                self._copied.record()
        return self._files

    def wait(self) -> None:
        """Wait until the copy has arrived; any thread may call it."""
        if self._copied is not None:
            self._copied.synchronize()

    def _lay_out(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate memory for all files, and assign each piece its position."""
        packed = list(pack(shards.mine(tensors, self._coords)))
        begins, total = [], 0
        for pieces in packed:
            begins.append(total)
            total += -(-sum(piece.bytes for piece in pieces) // ALIGN) * ALIGN
        self._signature, self._targets, self._files = None, [], []
        self.memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating the new
        if self._room:
            self.memory = self._room(total)
        elif total:
            self.memory = _memory(total, pinned=any(tensor.device.type != "cpu" for tensor in tensors.values()))
        view: memoryview = self.memory.numpy().data
        for number, (pieces, begin) in enumerate(zip(packed, begins, strict=True)):
            entries, end = dict[str, Entry](), 0
            for piece in pieces:
                entries[piece.key] = Entry(piece.dtype, piece.shape, end)
                end = entries[piece.key].end
                part = self.memory[begin + end - piece.bytes : begin + end]
                self._targets.append(part.view(piece.dtype).view(piece.shape))
            name = f"rank-{self._rank:05d}-{number:04d}.safetensors"
            self._files.append(File(name, begin, entries, view[begin : begin + end], tuple(pieces)))


def pack(tensors: Iterable[tuple[str, Tensor, Sequence[int]]], limit: int = FILE_BYTES) -> Iterable[list[Piece]]:
    """Group a rank's tensors into files; tensors larger than a file are cut into rows. Wide types come first in a file,
    so that all are aligned.
    """
    group, size = list[Piece](), 0
    for name, tensor, offset in tensors:
        for piece in cut(name, tensor, offset, limit):
            if group and size + piece.bytes > limit:
                yield sorted(group, key=lambda piece: -piece.dtype.itemsize)
                group, size = [], 0
            group.append(piece)
            size += piece.bytes
    if group:
        yield sorted(group, key=lambda piece: -piece.dtype.itemsize)


def cut(name: str, tensor: Tensor, offset: Sequence[int], limit: int) -> Iterable[Piece]:
    """Cut a tensor into pieces of at most `limit` bytes. Raises StoreError for a dtype that safetensors lacks."""
    if tensor.dtype not in NAMES:
        raise StoreError(f"cannot save {name}: safetensors has no dtype for {tensor.dtype}")
    shape, size = tuple(tensor.shape), tensor.numel() * tensor.dtype.itemsize
    if size <= limit or not shape:
        yield Piece(name=name, key=name, shape=shape, offset=tuple(offset), dtype=tensor.dtype, rows=None)
        return
    step = max(1, limit * shape[0] // size)
    for first in range(0, shape[0], step):
        last = min(first + step, shape[0])
        at = (offset[0] + first, *offset[1:])
        yield Piece(
            name=name,
            key=f"{name}@{at[0]}",
            shape=(last - first, *shape[1:]),
            offset=at,
            dtype=tensor.dtype,
            rows=(first, last),
        )


def _memory(size: int, *, pinned: bool) -> Tensor:
    """`size` bytes: pinned for copies from a GPU; else huge pages if available, because touching 4 KiB pages for the
    first time takes longer than the copy.
    """
    if pinned:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    memory = mmap.mmap(-1, size, **flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
