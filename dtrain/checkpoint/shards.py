"""A tensor and the pieces of it that ranks hold: saved on one mesh, read on any other.

A piece is {name, shape, offset, key, file}: where in the whole tensor it lies, and where its bytes are.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.sharding import local, offset

Offset = tuple[int, ...]


def mine(tensors: Mapping[str, Tensor], at: Mapping[str, int]) -> Iterator[tuple[str, Tensor, Offset]]:
    """(name, local piece, offset in the whole) of everything this rank is the one to write. `at` is `Mesh.place`."""
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
            copies = [place for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()]
            names = tensor.device_mesh.mesh_dim_names or ()
            if "tp" not in names:
                copies.append(at["tp"])
            if "dp_shard" not in names and "expert_shard" not in names:
                copies.append(at["expert_copy" if "ep" in names else "batch"])
            if not any(copies) and local(tensor).numel():
                yield name, local(tensor), offset(tensor)
        elif at["batch"] == at["tp"] == 0:
            yield name, tensor, (0,) * tensor.ndim


def load(tensor: Tensor, pieces: Sequence[Mapping[str, Any]], files: Mapping[str, Path]) -> None:
    """Fill this rank's part of `tensor` from the saved pieces that overlap it."""
    held, begin = local(tensor), offset(tensor)
    for piece in pieces:
        low = [max(a, b) for a, b in zip(begin, piece["offset"], strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(begin, held.shape, piece["offset"], piece["shape"], strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            with safe_open(files[piece["file"]], framework="pt") as opened:
                whole = opened.get_slice(piece["key"]) if held.ndim else opened.get_tensor(piece["key"])
                if held.ndim:
                    whole = whole[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, piece["offset"], strict=True))]
                target = held[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin, strict=True))]
                with torch.no_grad():
                    target.copy_(whole)


def needed(tensor: Tensor, pieces: Sequence[Mapping[str, Any]]) -> set[str]:
    """The files that hold a part of what this rank wants."""
    held, begin = local(tensor), offset(tensor)
    return {
        piece["file"]
        for piece in pieces
        if held.numel() and all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(begin, held.shape, piece["offset"], piece["shape"], strict=True))
    }
