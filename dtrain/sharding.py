"""What one rank holds of a tensor: the local piece of a DTensor, where it lies, and the piece of a whole tensor that is ours."""

import logging
import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

# private: there is no public way to ask a DTensor for the offset of its shard; a canary test catches the day it moves
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# putting the pieces of two axes together takes two gathers, which torch would have us avoid, at every call, on every rank
logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


def local(tensor: Tensor) -> Tensor:
    """The memory of this rank; the tensor itself when it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def offset(tensor: Tensor) -> tuple[int, ...]:
    """Where the local piece begins in the whole."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def whole(tensor: Tensor, like: Tensor) -> Tensor:
    """All of a tensor of which this rank has the piece `tensor`, sharded like `like`; every rank of the shard calls it."""
    if not isinstance(like, DTensor):
        return tensor
    return DTensor.from_local(tensor, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()).full_tensor()


def piece(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's piece of `whole`, a tensor that every rank has, sharded like `like`."""
    begin, size = offset(like), local(like).shape
    return whole[tuple(slice(a, a + n) for a, n in zip(begin, size, strict=True))]


def shards(tensor: Tensor) -> int:
    """Into how many different pieces the ranks have cut it; 1 when each has all of it."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))


def shard_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks among which the pieces of `tensor` lie; None when it is whole."""
    return tensor.device_mesh.get_group("dp_shard") if isinstance(tensor, DTensor) else None


def sum_over(group: dist.ProcessGroup | None, value: Tensor) -> Tensor:
    """`value` summed over the pieces, in place."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def like(piece: Tensor, tensor: Tensor, shape: torch.Size) -> Tensor:
    """`piece` as a tensor of `shape` that is sharded as `tensor` is, so that a checkpoint can tell where it belongs."""
    if not isinstance(tensor, DTensor):
        return piece
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(piece, tensor.device_mesh, tensor.placements, shape=shape, stride=stride)
