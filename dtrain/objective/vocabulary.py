"""Cross entropy of logits that are split over the vocabulary: three small all-reduces in place of gathering [N, V] (arXiv 1909.08053)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.objective import check_targets
from dtrain.sharding import local, offset


def cross_entropy(logits: DTensor, targets: Tensor, *, ignore: int) -> Tensor:
    """The sum over all targets [...] but `ignore` of -log softmax(logits [..., V])[target]; fp32, 0-dim, the same on all ranks.

    `logits` are split in their last dim over a mesh of one axis. Raises WordsError for a target outside of the vocabulary.
    """
    first, whole = offset(logits)[-1], logits.shape[-1]
    try:
        total: Tensor = _SplitCrossEntropy.apply(  # type: ignore[no-untyped-call]
            local(logits).flatten(0, -2), targets.flatten(), first, whole, ignore, logits.device_mesh.get_group()
        )
    except RuntimeError:
        check_targets(targets, whole)
        raise
    return total


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, first: int, whole: int, ignore: int, group: dist.ProcessGroup) -> Tensor:
        x_NV = logits_NV.float()
        largest_N = x_NV.amax(1) if x_NV.shape[1] else x_NV.new_full((len(x_NV),), -torch.inf)  # few words on many ranks
        dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=group)
        x_NV = x_NV - largest_N[:, None]
        index_N = targets_N - first
        here_N = (index_N >= 0) & (index_N < x_NV.shape[1])
        outside_N = (targets_N != ignore) & ((targets_N < 0) | (targets_N >= whole))  # gather refuses these, on a GPU without waiting for it
        index_N = index_N.where(here_N | outside_N, 0)
        chosen_N = x_NV.gather(1, index_N[:, None])[:, 0] * here_N if x_NV.shape[1] else torch.zeros_like(largest_N)
        exp_NV = x_NV.exp_()
        sums_2N = torch.stack((exp_NV.sum(1), chosen_N))
        dist.all_reduce(sums_2N, group=group)
        counts_N = targets_N != ignore
        ctx.save_for_backward(exp_NV.div_(sums_2N[0][:, None]), index_N, here_N & counts_N, counts_N)
        ctx.dtype = logits_NV.dtype
        return ((sums_2N[0].log() - sums_2N[1]) * counts_N).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax_NV, index_N, here_N, counts_N = ctx.saved_tensors
        out_NV = softmax_NV * counts_N[:, None]
        if out_NV.shape[1]:
            out_NV[torch.arange(len(index_N), device=index_N.device), index_N] -= here_N.to(out_NV.dtype)
        return (out_NV * gradient).to(ctx.dtype), None, None, None, None, None
