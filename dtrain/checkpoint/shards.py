"""A tensor and the pieces of it that ranks hold: saved on one mesh, read on any other.

A piece is {name, shape, offset, key, file}: where in the whole tensor it lies, and where its bytes are.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.mesh.sharding import local, offset

Offset = tuple[int, ...]
Slices = tuple[slice, ...]


def mine(tensors: Mapping[str, Tensor], at: Mapping[str, int]) -> Iterator[tuple[str, Tensor, Offset]]:
    """(name, local piece, offset in the whole) of everything this rank is the one to write. `at` is `Mesh.place`."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
            copies = [
                place
                for place, placement in zip(coordinate, tensor.placements, strict=True)
                if placement.is_replicate()
            ]
            names = tensor.device_mesh.mesh_dim_names or ()
            if "tp" not in names:
                copies.append(at["tp"])
            if "dp_shard" not in names and "expert_shard" not in names:
                copies.append(at["expert_copy" if "ep" in names else "batch"])
            if not any(copies) and local(tensor).numel():
                yield name, local(tensor), offset(tensor)
        elif at["batch"] == at["tp"] == 0:
            yield name, tensor, (0,) * tensor.ndim


class ShardOverlap:
    """This rank's part of a tensor, and the saved pieces that overlap it: (piece, where in the piece, where in what
    is held).
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
        """Copy the overlap of this number out of the whole piece `value`; another type is converted."""
        _, source, target = self.overlaps[number]
        with torch.no_grad():
            self.memory[target].copy_(value[source])
