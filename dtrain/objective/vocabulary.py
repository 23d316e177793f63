"""Cross entropy that never has all logits in fp32, for logits in 16 bits or split over the vocabulary.

Where blocks are compiled on a GPU, that of torch is too: it reads logits in a forward, and reads and writes them in a
backward. Elsewhere a few rows at a time are cast to fp32, and again in the backward. Only the original logits and two
numbers per row are kept in between. For split logits, small all-reduces replace gathering [N, V] (arXiv 1909.08053).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.data import IGNORE
from dtrain.mesh.sharding import local, offset
from dtrain.objective import check_targets, chunked, fused, nats
from dtrain.objective.head import Deferred, compiles, untouched
from dtrain.predict.chunks import LOSS_ROWS

HALVES = (torch.bfloat16, torch.float16)
LARGEST_EXPONENT = 709.0
"""The largest integer whose exp is finite in fp64."""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy summed over the targets [...] that are not IGNORE; fp32, 0-dim, the same on all ranks.

    `logits` [..., V] are whole, or split in their last dim over a mesh of one axis, or deferred: then they are computed
    a chunk at a time. Raises WordsError for a target outside of the vocabulary.
    """
    logits = untouched(logits)
    if isinstance(logits, Deferred):
        return chunked.cross_entropy(logits, targets)
    if not isinstance(logits, DTensor) and compiles(logits):
        return _compiled(logits, targets, "sum")
    if isinstance(logits, DTensor) or logits.dtype in HALVES:
        return _nats(logits, targets).sum()
    return nats(logits.flatten(0, -2), targets.flatten())


def token_nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each target [...], 0 where it is IGNORE; else as `cross_entropy`."""
    logits = untouched(logits)
    if isinstance(logits, Deferred):
        return chunked.token_nats(logits, targets)
    if not isinstance(logits, DTensor) and compiles(logits):
        return _compiled(logits, targets, "none").view(targets.shape)
    if isinstance(logits, DTensor) or logits.dtype in HALVES:
        return _nats(logits, targets).view(targets.shape)
    rows = logits.float().flatten(0, -2)
    try:
        each = F.cross_entropy(rows, targets.flatten(), ignore_index=IGNORE, reduction="none")
    except IndexError:
        check_targets(targets, logits.shape[-1])
        raise
    return each.view(targets.shape)


def _compiled(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    with torch.autocast(logits.device.type, enabled=False):  # it is fp32 throughout
        loss: Tensor = fused.kernel(_of_torch)(logits.flatten(0, -2), targets.flatten(), reduction)
    return loss


def _of_torch(logits_NV: Tensor, targets_N: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORE, reduction=reduction)


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each target, flat."""
    first, whole = offset(logits)[-1], logits.shape[-1]
    group = logits.device_mesh.get_group() if isinstance(logits, DTensor) else None
    rows = local(logits).flatten(0, -2)
    try:
        nats: Tensor = _CrossEntropy.apply(rows, targets.flatten(), first, whole, group)  # type: ignore
        return nats
    except RuntimeError:
        check_targets(targets, whole)
        raise


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, first: int, whole: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        width = logits_NV.shape[1]
        largest_N = logits_NV.new_full((len(logits_NV),), -torch.inf).float()
        if width:  # else the vocabulary has fewer tokens than there are ranks
            largest_N = logits_NV.amax(1).float()
        if group is not None:
            dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=group)
        index_N = targets_N - first
        here_N = (index_N >= 0) & (index_N < width)
        # gather refuses these itself, so a GPU need not be synchronised to check them
        counts_N = targets_N != IGNORE
        outside_N = counts_N & ((targets_N < 0) | (targets_N >= whole))
        index_N = index_N.where(here_N | outside_N, 0)
        chosen_N = (
            (logits_NV.gather(1, index_N[:, None])[:, 0] - largest_N) * here_N if width else torch.zeros_like(largest_N)
        )
        sums_2N = torch.stack((torch.empty_like(largest_N), chosen_N))
        for rows in chunks(logits_NV):
            sums_2N[0, rows] = (logits_NV[rows] - largest_N[rows, None]).exp_().sum(1)
        if group is not None:
            dist.all_reduce(sums_2N, group=group)
        ctx.save_for_backward(logits_NV, largest_N, sums_2N[0], index_N, here_N & counts_N, counts_N)
        return (sums_2N[0].log() - sums_2N[1]) * counts_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_NV, largest_N, sum_N, index_N, here_N, counts_N = ctx.saved_tensors
        out_NV = torch.empty_like(logits_NV)
        for rows in chunks(logits_NV):
            softmax = (logits_NV[rows] - largest_N[rows, None]).exp_().div_(sum_N[rows, None])
            softmax.mul_(counts_N[rows, None])
            if softmax.shape[1]:
                each = torch.arange(len(softmax), device=softmax.device)
                softmax[each, index_N[rows]] -= here_N[rows].to(softmax.dtype)
            out_NV[rows] = softmax.mul_(gradient_N[rows, None])
        return out_NV, None, None, None, None


def chunks(logits_NV: Tensor) -> Iterator[slice]:
    rows = max(1, LOSS_ROWS // max(1, 4 * logits_NV.shape[1]))
    return (slice(first, first + rows) for first in range(0, len(logits_NV), rows))
