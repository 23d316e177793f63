"""Tensors and their pieces on the ranks: saved on one mesh, loaded on any other.

A piece is {name, shape, offset, key, file}: its position in the whole tensor, and the location of its bytes.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.mesh.sharding import local, offset

Offset = tuple[int, ...]
Slices = tuple[slice, ...]


def mine(tensors: Mapping[str, Tensor], coords: Mapping[str, int]) -> Iterator[tuple[str, Tensor, Offset]]:
    """(name, local piece, offset in the whole) of all that this rank writes. `coords`: `Mesh.replica_coords`."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
            axes = zip(coordinate, tensor.placements, strict=True)
            copies = [index for index, placement in axes if placement.is_replicate()]
            names = tensor.device_mesh.mesh_dim_names or ()
            if "tp" not in names:
                copies.append(coords["tp"])
            if "dp_shard" not in names and "expert_shard" not in names:
                copies.append(coords["expert_copy" if "ep" in names else "batch"])
            if not any(copies) and local(tensor).numel():
                yield name, local(tensor), offset(tensor)
        elif coords["batch"] == coords["tp"] == 0:
            yield name, tensor, (0,) * tensor.ndim


def described(tensors: Mapping[str, Tensor], written: Collection[str]) -> dict[str, dict[str, Any]]:
    """Shape and dtype of each tensor of which this rank writes a piece, and of empty ones, which have none."""
    own = {name: tensor for name, tensor in tensors.items() if name in written or not tensor.numel()}
    return {name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype)} for name, tensor in own.items()}


def grouped(pieces: Iterable[Mapping[str, Any]], by: str) -> defaultdict[str, list[Mapping[str, Any]]]:
    """The pieces of each name or file."""
    groups = defaultdict[str, list[Mapping[str, Any]]](list)
    for piece in pieces:
        groups[piece[by]].append(piece)
    return groups


def _slices(low: Sequence[int], high: Sequence[int], start: Sequence[int]) -> Slices:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True))


class ShardOverlap:
    """This rank's part of a tensor, and the saved pieces that overlap it: (piece, slices of the piece, slices of the
    part).
    """

    def __init__(self, tensor: Tensor, pieces: Sequence[Mapping[str, Any]]) -> None:
        self.memory = local(tensor)
        begin, shape = offset(tensor), self.memory.shape
        self.overlaps: list[tuple[Mapping[str, Any], Slices, Slices]] = []
        for piece in pieces:
            low = [max(a, b) for a, b in zip(begin, piece["offset"], strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(begin, shape, piece["offset"], piece["shape"], strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                self.overlaps.append((piece, _slices(low, high, piece["offset"]), _slices(low, high, begin)))

    def fill(self, number: int, value: Tensor) -> None:
        """Copy overlap `number` from the whole piece `value`, converted to the type of the part."""
        _, source, target = self.overlaps[number]
        with torch.no_grad():
            self.memory[target].copy_(value[source])
