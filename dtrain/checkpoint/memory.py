"""Copies of the state in the memory of the nodes, which outlive the ranks: the copy of each rank is on its own node and
on the next one.

    $DTRAIN_MEMORY/<run>-00003-0.bytes, .json     rank 3, slot 0; the copy before or after is in slot 1

A copy is valid if its description exists: it is removed before bytes change and written atomically after them. A step
is complete if the surviving nodes have the copies of all its ranks.
"""

import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.checkpoint import shards
from dtrain.checkpoint.format import DTYPES, NAMES
from dtrain.checkpoint.snapshot import File, Snapshot
from dtrain.errors import StoreError
from dtrain.mesh import Mesh
from dtrain.weights.safetensors import strict

STEM = re.compile(r"[0-9A-Za-z-]{1,80}-[0-9]{5,9}-[01]")


@dataclass(frozen=True)
class Copy:
    """The copies of one step. `parts`: name of each rank's copy -> its description; `holders`: name -> the ranks whose
    nodes have it.
    """

    step: int
    parts: Mapping[str, Mapping[str, Any]]
    holders: Mapping[str, Sequence[int]]

    @property
    def commit(self) -> dict[str, Any]:
        """The copies as a commit; the `file` of a piece is the name of a rank's copy."""
        first = min(self.parts.values(), key=lambda part: part["rank"])
        optim, tensors, pieces = dict[str, Any](), dict[str, Any](), list[dict[str, Any]]()
        resting = set[str]()
        for stem, part in self.parts.items():
            optim |= part["facts"]["optim"]
            resting |= set(part["facts"].get("resting", ()))
            tensors |= part["tensors"]
            pieces += [{**piece, "file": stem} for piece in part["pieces"]]
        facts = {**first["facts"], "optim": optim, "resting": sorted(resting)}
        return {"step": self.step, "facts": facts, "tensors": tensors, "pieces": pieces}


class Memory:
    """The copies of this rank, in a `folder` shared by the ranks of its node. `run`: a unique name of this start of the
    ranks.
    """

    def __init__(self, mesh: Mesh, folder: str, run: str) -> None:
        self._mesh, self._folder, self._run = mesh, Path(folder), run
        self._slots = [Snapshot(mesh.rank, mesh.replica_coords, partial(self._map, slot)) for slot in (0, 1)]
        self._memories: dict[Path, Tensor] = {}
        self._count = 0
        self._next, self._sources = _neighbours(mesh)

    def take(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Copy the shards that this rank writes, and receive those of the previous node; all ranks call it. Raises
        StoreError on all ranks if one has no room.
        """
        slot, self._count = self._count % 2, self._count + 1
        description = self._path(self._mesh.rank, slot, "json")
        description.unlink(missing_ok=True)
        files: list[File] = self._on_all(lambda: self._slots[slot].take(tensors))
        self._slots[slot].wait()
        pieces = list[dict[str, Any]]()
        for file in files:
            begin = file.begin
            for piece in file.pieces:
                pieces.append({"name": piece.name, **piece.place, "dtype": NAMES[piece.dtype], "begin": begin})
                begin += piece.bytes
        shapes = shards.described(tensors, {piece["name"] for piece in pieces})
        about = {"step": step, "rank": self._mesh.rank, "world": self._mesh.world, "run": self._run, "facts": facts}
        about |= {"tensors": shapes, "pieces": pieces, "stem": self._stem(self._mesh.rank, slot)}
        text = json.dumps(about).encode()
        _write_atomically(description, text)
        if self._next is not None:
            self._swap(text, self._slots[slot].memory, slot)
        if self._count == 2:  # the copies that these ranks started from are no longer needed
            self.forget(lambda stem: stem.startswith(self._run))

    def newest(self) -> Copy | None:
        """The newest step that is complete on the surviving nodes; all ranks call it."""
        mine = dict(_descriptions(self._folder)) if int(os.environ.get("LOCAL_RANK", 0)) == 0 else {}
        steps: dict[tuple[int, str], tuple[dict[str, Mapping[str, Any]], dict[str, list[int]]]] = {}
        for rank, copies in enumerate(self._mesh.gather(mine)):
            for stem, about in copies.items():
                parts, holders = steps.setdefault((about["step"], about["run"]), ({}, {}))
                parts[stem] = about
                holders.setdefault(stem, []).append(rank)
        for (step, _), (parts, holders) in sorted(steps.items(), key=lambda item: item[0], reverse=True):
            world = next(iter(parts.values()))["world"]
            if {part["rank"] for part in parts.values()} >= set(range(world)):
                return Copy(step, dict(sorted(parts.items())), holders)
        return None

    def fill(self, copy: Copy, wanted: Mapping[str, Tensor]) -> None:
        """Fill this rank's parts of `wanted`, also from other nodes; all ranks call it."""
        pieces = shards.grouped(copy.commit["pieces"], "name")
        overlaps = [shards.ShardOverlap(tensor, pieces[name]) for name, tensor in wanted.items()]
        for stem in copy.parts:
            data = self._everywhere(stem, copy)
            for one in overlaps:
                for number, (piece, *_) in enumerate(one.overlaps):
                    if piece["file"] == stem:
                        dtype, begin = DTYPES[piece["dtype"]], piece["begin"]
                        end = begin + torch.Size(piece["shape"]).numel() * dtype.itemsize
                        one.fill(number, data[begin:end].view(dtype).view(piece["shape"]))

    def forget(self, but: Callable[[str], bool]) -> None:
        """Remove the copies on this node, except those with these names."""
        for path in self._folder.glob("*"):
            if not but(path.stem):
                path.unlink(missing_ok=True)  # another rank of the node may remove it first

    def _everywhere(self, stem: str, copy: Copy) -> Tensor:
        """The bytes of one rank's copy, on every rank."""
        path, holders = self._folder / f"{stem}.bytes", copy.holders[stem]
        here = path.with_suffix(".json").exists()
        sizes = self._mesh.gather(path.stat().st_size if here else -1)
        if min(sizes) >= 0:
            return _read(path)
        data = _read(path) if here else torch.empty(max(sizes), dtype=torch.uint8)
        if data.numel():
            dist.broadcast(data, src=holders[0])
        return data

    def _swap(self, text: bytes, memory: Tensor, slot: int) -> None:
        """Send this rank's copy to the next node, and receive those of the previous node."""
        sources = self._sources
        sizes = {rank: torch.zeros(2, dtype=torch.int64) for rank in sources}
        self._exchange(torch.tensor([len(text), memory.numel()]), [sizes[rank] for rank in sources])
        texts = {rank: torch.empty(int(sizes[rank][0]), dtype=torch.uint8) for rank in sources}
        self._exchange(torch.frombuffer(bytearray(text), dtype=torch.uint8), list(texts.values()))
        for rank in sources:
            self._path(rank, slot, "json").unlink(missing_ok=True)
        rooms = {self._path(rank, slot, "bytes"): int(sizes[rank][1]) for rank in sources}
        self._exchange(memory, self._on_all(lambda: [self._room(path, size) for path, size in rooms.items()]))
        for rank in sources:
            _write_atomically(self._path(rank, slot, "json"), bytes(texts[rank].numpy()))

    def _on_all(self, act: Callable[[], Any]) -> Any:
        """The result of `act`. An error on any rank is raised on all ranks, which would otherwise wait for it."""
        error, result = "", None
        try:
            result = act()
        except StoreError as failure:
            error = str(failure)
        if message := next(filter(None, self._mesh.gather(error)), None):
            raise StoreError(message)
        return result

    def _exchange(self, send: Tensor, receive: list[Tensor]) -> None:
        """Send `send` to the next node, and fill `receive` from the ranks of the previous node."""
        works = [dist.isend(send, self._next)] if send.numel() else []
        expected = [(tensor, rank) for tensor, rank in zip(receive, self._sources, strict=True) if tensor.numel()]
        works += [dist.irecv(tensor, rank) for tensor, rank in expected]
        for work in filter(None, works):
            work.wait()

    def _map(self, slot: int, size: int) -> Tensor:
        return _mapped(self._path(self._mesh.rank, slot, "bytes"), size)

    def _room(self, path: Path, size: int) -> Tensor:
        if path not in self._memories or self._memories[path].numel() != size:
            self._memories[path] = _mapped(path, size)
        return self._memories[path]

    def _stem(self, rank: int, slot: int) -> str:
        return f"{self._run}-{rank:05d}-{slot}"

    def _path(self, rank: int, slot: int, suffix: str) -> Path:
        return self._folder / f"{self._stem(rank, slot)}.{suffix}"


def _neighbours(mesh: Mesh) -> tuple[int | None, list[int]]:
    """The rank on the next node that receives this rank's copy (None on a single node), and the ranks of the previous
    node whose copies it receives.
    """
    places = mesh.gather(int(os.environ.get("GROUP_RANK", 0)))
    nodes = {node: [rank for rank, place in enumerate(places) if place == node] for node in sorted(set(places))}
    if len(nodes) < 2:
        return None, []
    groups, to = list(nodes.values()), dict[int, int]()
    for ranks, after in zip(groups, [*groups[1:], groups[0]], strict=True):
        to |= {rank: after[index % len(after)] for index, rank in enumerate(ranks)}
    return to[mesh.rank], [rank for rank, target in to.items() if target == mesh.rank]


def _descriptions(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in folder.glob("*.json"):
        with suppress(ValueError, KeyError, TypeError, OSError):
            about = strict(path.read_bytes())
            if STEM.fullmatch(path.stem) and about["stem"] == path.stem and path.with_suffix(".bytes").exists():
                yield path.stem, about


def _write_atomically(path: Path, text: bytes) -> None:
    """Write a file atomically. It is in memory, so it needs no sync."""
    beside = path.with_suffix(".new")
    beside.write_bytes(text)
    beside.replace(path)


def _mapped(path: Path, size: int) -> Tensor:
    """Map `size` bytes of a file. Raises StoreError if there is no room: a missing page would kill the process."""
    try:
        with path.open("w+b") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
            return _view(file.fileno(), size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StoreError.during(
            "keep a copy in memory at", str(path), error.strerror or error, "Type checkpoint.memory=0 to do without"
        ) from error


def _read(path: Path) -> Tensor:
    """The bytes of a copy, mapped."""
    with path.open("r+b") as file:
        return _view(file.fileno(), path.stat().st_size)


def _view(descriptor: int, size: int) -> Tensor:
    """The bytes of a file, mapped; an empty file cannot be."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
