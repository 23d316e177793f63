"""A rank's part of a tensor: the local piece of a DTensor, its offset, and this rank's piece of a whole tensor."""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

# private: there is no public way to ask a DTensor for the offset of its shard; a canary test catches the day it moves
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# putting the pieces of two axes together takes two gathers, which torch would have us avoid, at every call, on every
# rank
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def local(tensor: Tensor) -> Tensor:
    """The local piece; the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def offset(tensor: Tensor) -> tuple[int, ...]:
    """The offset of the local piece in the whole."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def whole(piece: Tensor, tensor: Tensor) -> Tensor:
    """The whole of which this rank has `piece`, sharded like `tensor`; every rank of the shards calls it."""
    sharded = like(piece, tensor)
    return sharded.full_tensor() if isinstance(sharded, DTensor) else piece


def reduced(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, sharded like it: tensor parallelism leaves partial sums where it replicates one."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor, in the shapes of these tensors one after the other."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def region(tensor: Tensor) -> tuple[slice, ...]:
    """Slices of this rank's piece in the whole."""
    return tuple(slice(a, a + n) for a, n in zip(offset(tensor), local(tensor).shape, strict=True))


def shards(tensor: Tensor) -> int:
    """The number of different pieces; 1 if each rank has all of it."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))


def sum_pieces(parts: Iterable[tuple[Tensor, Tensor, int | None]]) -> list[Tensor]:
    """For each (value, tensor, dim): the value summed over the ranks that hold other pieces of the tensor along `dim`
    (None: along any). One all-reduce for each axis of a mesh; every rank of it calls this with parts of the same
    tensors.
    """
    values, axes = list[Tensor](), dict[dist.ProcessGroup, list[int]]()
    for index, (value, tensor, dim) in enumerate(parts):
        values.append(value)
        for axis in axes_of(tensor, dim):
            axes.setdefault(cast(DTensor, tensor).device_mesh.get_group(axis), []).append(index)
    for group, members in axes.items():
        flat = torch.cat([values[index].flatten() for index in members])
        dist.all_reduce(flat, group=group)
        totals = split_like(flat, [values[index] for index in members])
        for index, total in zip(members, totals, strict=True):
            values[index] = total
    return values


def axes_of(tensor: Tensor, dim: int | None) -> list[int]:
    """The mesh axes that split a tensor along `dim` (None: along any), in the order of the mesh."""
    if not isinstance(tensor, DTensor):
        return []
    axes = []
    for axis, (size, placement) in enumerate(zip(tensor.device_mesh.shape, tensor.placements, strict=True)):
        split = getattr(placement, "dim", None)
        if size > 1 and split is not None and (dim is None or split == dim % tensor.ndim):
            axes.append(axis)
    return axes


def like(piece: Tensor, tensor: Tensor, reduced: int | None = None) -> Tensor:
    """`piece` as a DTensor sharded like `tensor`, so that a checkpoint knows its place; along the dim `reduced` it has
    size 1 on every rank.
    """
    if not isinstance(tensor, DTensor):
        return piece
    shape, placements = list(tensor.shape), list(tensor.placements)
    if reduced is not None:
        shape[reduced] = 1
        for axis in axes_of(tensor, reduced):
            placements[axis] = Replicate()
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(piece, tensor.device_mesh, placements, shape=torch.Size(shape), stride=stride)
