"""Pieces of weights on other storage of which ranks need copies, columns or little: together they read each byte once,
in blocks, and send one another the parts.

A piece that is cut into large runs, as FSDP does, is none of these: each rank reads its own run (`shared`).
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.checkpoint.format import Entry
from dtrain.checkpoint.load import tensor_of
from dtrain.errors import StoreError
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import region
from dtrain.storage import store
from dtrain.weights import SIZES, ForeignError, Piece, Stored, contiguous

BLOCK = 8 << 20
"""Bytes of a block, at most; a quarter of the largest piece, if that is less."""
ROUND = 4
"""Blocks that are passed on at a time: so many, and two of its own, are in the memory of a rank."""
SMALL = 1 << 18
"""Bytes for which a rank makes no request of its own."""
GAP = 1 << 16
"""Bytes between two runs of a file that are read too, because a request costs more."""

Box = tuple[slice, ...]
"""In elements of a whole tensor."""
Key = tuple[str, int]
"""The name of a tensor and the number of one of its pieces."""


class Rows(NamedTuple):
    """Consecutive rows of a piece: `box` of the tensor `name`, from the byte `begin` of a file on."""

    name: str
    box: Box
    dtype: torch.dtype
    url: str
    begin: int

    @property
    def end(self) -> int:
        return self.begin + _count(self.box) * self.dtype.itemsize


def boxes_of(mesh: Mesh, wanted: Mapping[str, Tensor]) -> list[dict[str, Box]]:
    """The part of each tensor that each rank has; all ranks call it."""
    mine = {name: [[part.start, part.stop] for part in region(tensor)] for name, tensor in wanted.items()}
    return [{name: tuple(slice(*part) for part in box) for name, box in rank.items()} for rank in mesh.gather(mine)]


def shared(tensors: Mapping[str, Stored], boxes: Sequence[Mapping[str, Box]]) -> dict[Key, Piece]:
    """The pieces that the ranks read together."""
    found = dict[Key, Piece]()
    for name, stored in tensors.items():
        distinct = [each[name] for each in boxes if name in each]
        for number, piece in enumerate(stored.pieces):
            rows = not piece.packed and piece.stride == contiguous(piece.shape) and not store.is_local(piece.url)
            if rows and _is_shared(piece, distinct, SIZES[stored.dtype]):
                found[name, number] = piece
    return found


def _is_shared(piece: Piece, boxes: Sequence[Box], size: int) -> bool:
    """Whether ranks need copies, columns or little of a piece of elements of `size` bytes."""
    parts = [part for box in boxes if (part := overlap(_box(piece), box)) is not None]
    counts = [_count(part) for part in parts]
    if len(parts) < 2:
        return False
    return (
        sum(counts) > math.prod(piece.shape)
        or min(counts) * size < SMALL
        or not all(_is_run(part, piece.shape) for part in parts)
    )


def _is_run(part: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box of a row-major tensor is one run of elements."""
    sizes = [each.stop - each.start for each in part]
    cut = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    return sizes[cut + 1 :] == [*shape[cut + 1 :]]


def blocks_of(tensors: Mapping[str, Stored], pieces: Mapping[Key, Piece], world: int) -> list[list[Rows]]:
    """The rows of these pieces, in the order of the files, in blocks of about the same size: a multiple of `world`,
    unless there are fewer rows.
    """
    sizes = [math.prod(piece.shape) * SIZES[tensors[name].dtype] for (name, _), piece in pieces.items()]
    turns = math.ceil(sum(sizes) / (world * max(1, min(BLOCK, max(sizes) // 4))))
    step, place, full, blocks = sum(sizes) / (world * turns), 0, 0.0, list[list[Rows]]()
    for (name, _), piece in sorted(pieces.items(), key=lambda each: (each[1].url, each[1].begin)):
        dtype: torch.dtype = getattr(torch, tensors[name].dtype)
        dim = next((dim for dim, size in enumerate(piece.shape) if size > 1), 0)
        count = piece.shape[dim] if piece.shape else 1
        width = math.prod(piece.shape) // count * dtype.itemsize
        low = 0
        while low < count:
            if place >= full:
                blocks.append([])
                full = step * len(blocks)
            high = min(count, low + max(1, math.ceil((full - place) / width)))
            box = list(_box(piece))
            if box:
                box[dim] = slice(box[dim].start + low, box[dim].start + high)
            blocks[-1].append(Rows(name, tuple(box), dtype, piece.url, piece.begin + low * width))
            place += (high - low) * width
            low = high
    return blocks


@dataclass(frozen=True)
class Exchange:
    """`put(name, box, value)` is called on each rank with what it needs; block k is read by rank k modulo their
    number.
    """

    mesh: Mesh
    blocks: Sequence[Sequence[Rows]]
    boxes: Sequence[Mapping[str, Box]]
    put: Callable[[str, Box, Tensor], None]

    def run(self) -> None:
        """All ranks call it. A rank that cannot read sends zeros, so that no other waits in vain, and raises its
        StoreError at the end.
        """
        own, ahead, failed = self._own(), deque[Future[list[Tensor]]](), list[Exception]()
        with ThreadPoolExecutor(1) as pool:
            ahead.extend(pool.submit(read, block) for block in itertools.islice(own, 2))
            width = min(ROUND, self.mesh.world)  # so no rank reads two blocks of a round
            for first in range(0, len(self.blocks), width):
                numbers = range(first, min(first + width, len(self.blocks)))
                data = list[Tensor]()
                for mine in (number for number in numbers if number % self.mesh.world == self.mesh.rank):
                    data = self._answer(ahead.popleft(), self.blocks[mine], failed)
                    ahead.extend(pool.submit(read, block) for block in itertools.islice(own, 1))
                self._pass_on(numbers, data)
        if failed:
            raise failed[0]

    def _own(self) -> Iterator[Sequence[Rows]]:
        return iter(self.blocks[self.mesh.rank :: self.mesh.world])

    def _answer(self, read: Future[list[Tensor]], block: Sequence[Rows], failed: list[Exception]) -> list[Tensor]:
        try:
            return read.result()
        except (StoreError, OSError) as error:
            failed.append(error)
            return [torch.zeros(_shape(rows.box), dtype=rows.dtype) for rows in block]

    def _pass_on(self, numbers: Sequence[int], data: Sequence[Tensor]) -> None:
        """Send and receive the parts of some blocks, of which this rank has read the one with these `data`."""
        mesh, works, kept = self.mesh, list[Any](), list[Tensor]()
        coming = list[tuple[Sequence[tuple[int, Box]], Sequence[Rows], Tensor]]()
        for number in numbers:
            block, reader = self.blocks[number], number % mesh.world
            if reader != mesh.rank:
                if parts := self._parts(block, mesh.rank):
                    size = sum(_count(box) * block[index].dtype.itemsize for index, box in parts)
                    coming.append((parts, block, torch.empty(size, dtype=torch.uint8)))
                    works.append(dist.irecv(coming[-1][-1], reader, tag=number % ROUND))
                continue
            packed = dict[str, Tensor]()  # copies get the same bytes
            for rank in range(mesh.world):
                parts = self._parts(block, rank)
                if parts and rank != mesh.rank:
                    if (same := repr(parts)) not in packed:
                        packed[same] = _packed(block, parts, data)
                    works.append(dist.isend(packed[same], rank, tag=number % ROUND))
            kept += packed.values()
            for index, box in self._parts(block, mesh.rank):
                self.put(block[index].name, box, data[index][_inside(box, block[index].box)])
        for work in works:
            work.wait()
        for needed, block, buffer in coming:
            begin = 0
            for index, box in needed:
                end = begin + _count(box) * block[index].dtype.itemsize
                flat = buffer[begin:end] if begin % block[index].dtype.itemsize == 0 else buffer[begin:end].clone()
                self.put(block[index].name, box, flat.view(block[index].dtype).view(_shape(box)))
                begin = end

    def _parts(self, block: Sequence[Rows], rank: int) -> list[tuple[int, Box]]:
        """(number of the rows, box of them) that a rank needs of a block."""
        has = self.boxes[rank]
        parts = ((index, overlap(rows.box, has[rows.name])) for index, rows in enumerate(block) if rows.name in has)
        return [(index, box) for index, box in parts if box is not None]


def read(block: Sequence[Rows]) -> list[Tensor]:
    """The values of the rows of a block; rows that are near in a file by one request. Raises ForeignError."""
    values, run = list[Tensor](), list[Rows]()
    for rows, after in itertools.zip_longest(block, block[1:]):
        run.append(rows)
        if after and after.url == rows.url and 0 <= after.begin - rows.end <= GAP:
            continue
        begin = run[0].begin
        data = store.parts(rows.url, [begin], rows.end - begin)[0]
        if len(data) != rows.end - begin:
            raise ForeignError.during("read", rows.url, "it is cut off")
        values += [tensor_of(data, Entry(each.dtype, _shape(each.box), each.begin - begin)) for each in run]
        run = []
    return values


def overlap(one: Box, other: Box) -> Box | None:
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return both if all(part.start < part.stop for part in both) else None


def _packed(block: Sequence[Rows], parts: Sequence[tuple[int, Box]], data: Sequence[Tensor]) -> Tensor:
    """The bytes of some boxes of a block, one after the other."""
    values = [data[index][_inside(box, block[index].box)] for index, box in parts]
    return torch.cat([value.contiguous().view(-1).view(torch.uint8) for value in values])


def _inside(box: Box, outer: Box) -> Box:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def _box(piece: Piece) -> Box:
    return tuple(slice(begin, begin + size) for begin, size in zip(piece.offset, piece.shape, strict=True))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def _count(box: Box) -> int:
    return math.prod(_shape(box))
