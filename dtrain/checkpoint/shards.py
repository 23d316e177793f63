"""Tensors and their pieces on the ranks: saved on one mesh, loaded on any other.

A piece is {name, shape, offset, key, file}: its position in the whole tensor, and the location of its bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
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
            copies = [
                index
                for index, placement in zip(coordinate, tensor.placements, strict=True)
                if placement.is_replicate()
            ]
            names = tensor.device_mesh.mesh_dim_names or ()
            if "tp" not in names:
                copies.append(coords["tp"])
            if "dp_shard" not in names and "expert_shard" not in names:
                copies.append(coords["expert_copy" if "ep" in names else "batch"])
            if not any(copies) and local(tensor).numel():
                yield name, local(tensor), offset(tensor)
        elif coords["batch"] == coords["tp"] == 0:
            yield name, tensor, (0,) * tensor.ndim


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
                source = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece["offset"], strict=True))
                self.overlaps.append(
                    (piece, source, tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True)))
                )

    def fill(self, number: int, value: Tensor) -> None:
        """Copy overlap `number` from the whole piece `value`, converted to the type of the part."""
        _, source, target = self.overlaps[number]
        with torch.no_grad():
            self.memory[target].copy_(value[source])
