"""The elementwise part of a chunked cross entropy: logits become their own gradient, in few passes over memory.

Logits stay in the type of the products, and are fp32 only while they are computed with. Compiled, each function here is
a loop over each row, and exponentials exist nowhere. As written, a few rows at a time, which stay in a cache, are fp32.

That a gradient takes the place of its logits is from Liger (arXiv 2410.10989), and that only what lies between the
products is compiled from torchtune (https://github.com/pytorch/torchtune/pull/1390). Cut Cross-Entropy (arXiv
2411.09009) leaves out the logits too, in kernels of its own.

Shapes: R rows, of which B are a block, V this rank's part of the vocabulary. `index`: the column of a row's target, -1
if it is not in this part.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dtrain.predict.chunks import BLOCK


def nats_(
    logits_RV: Tensor, target_R: Tensor, index_R: Tensor, *, counts_R: Tensor, scale: Tensor, compiled: bool
) -> Tensor:
    """Cross entropy of each row in fp32, times `counts`; `logits_RV` becomes the gradient of their sum, times `scale`,
    0-dim. `target_R`: the logits of the targets, fp32.
    """
    if compiled:
        nats_R: Tensor = kernel(_nats_)(logits_RV, target_R, index_R, counts_R, scale)
        return nats_R
    scale_R = scale * counts_R
    nats_R = torch.empty_like(target_R)

    def write(rows: slice) -> Tensor:  # in which a block ends before the next begins
        exp_BV = logits_RV[rows].float()
        largest_B = exp_BV.amax(1)
        sums_B = exp_BV.sub_(largest_B[:, None]).exp_().sum(1)
        _write(logits_RV[rows], exp_BV, sums_B, index_R[rows], scale_R[rows])
        return (sums_B.log() - (target_R[rows] - largest_B)) * counts_R[rows]

    for rows in _blocks(logits_RV):
        nats_R[rows] = write(rows)
    return nats_R


def sums(logits_RV: Tensor, *, compiled: bool) -> tuple[Tensor, Tensor]:
    """(largest logit, sum of the exponentials of what logits are below it) of each row, fp32."""
    if not logits_RV.shape[1]:  # the vocabulary has fewer tokens than there are ranks
        sums_R = logits_RV.new_zeros(len(logits_RV), dtype=torch.float32)
        return torch.full_like(sums_R, -torch.inf), sums_R
    if compiled:
        both: tuple[Tensor, Tensor] = kernel(_sums)(logits_RV)
        return both
    largest_R, sums_R = logits_RV.new_empty((2, len(logits_RV)), dtype=torch.float32)
    for rows in _blocks(logits_RV):
        largest_R[rows] = logits_RV[rows].amax(1)
        sums_R[rows] = (logits_RV[rows] - largest_R[rows, None]).exp_().sum(1)
    return largest_R, sums_R


def gradient_(
    logits_RV: Tensor, largest_R: Tensor, sums_R: Tensor, index_R: Tensor, scale_R: Tensor, *, compiled: bool
) -> None:
    """`logits_RV` becomes the gradient of the cross entropy, times `scale`; the sums are of the whole vocabulary."""
    if not logits_RV.shape[1]:
        return
    if compiled:
        kernel(_gradient_)(logits_RV, largest_R, sums_R, index_R, scale_R)
        return
    for rows in _blocks(logits_RV):
        out_BV, below_BV = logits_RV[rows], logits_RV[rows].float().sub_(largest_R[rows, None])
        _write(out_BV, below_BV.exp_(), sums_R[rows], index_R[rows], scale_R[rows])
        del below_BV  # before the next is there


def _blocks(logits_RV: Tensor) -> Iterator[slice]:
    kind = logits_RV.device.type
    each = BLOCK.get(kind, max(BLOCK.values()))
    if kind == "cpu":  # each core has a cache
        each *= torch.get_num_threads()
    rows = max(1, each // (4 * logits_RV.shape[1]))
    return (slice(first, first + rows) for first in range(0, len(logits_RV), rows))


def _write(out_BV: Tensor, exp_BV: Tensor, sums_B: Tensor, index_B: Tensor, scale_B: Tensor) -> None:
    """Into `out_BV` the gradient of its logits; `exp_BV`, which may be the same memory, is overwritten."""
    exp_BV.mul_((scale_B / sums_B)[:, None])
    exp_BV.scatter_add_(1, index_B.clamp(0)[:, None], -(scale_B * (index_B >= 0))[:, None])
    if exp_BV.dtype != out_BV.dtype:
        out_BV.copy_(exp_BV)


def _nats_(logits_RV: Tensor, target_R: Tensor, index_R: Tensor, counts_R: Tensor, scale: Tensor) -> Tensor:
    largest_R, sums_R = _sums(logits_RV)
    _gradient_(logits_RV, largest_R, sums_R, index_R, scale * counts_R)
    return (sums_R.log() - (target_R - largest_R)) * counts_R


def _sums(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    x_RV = logits_RV.float()
    # with both dims kept torch's compiler makes one pass of the two
    # (https://github.com/pytorch/pytorch/blob/main/torch/_inductor/fx_passes/post_grad.py: prepare_softmax_pattern)
    largest_R1 = x_RV.amax(1, keepdim=True)
    sums_R1 = (x_RV - largest_R1).exp().sum(1, keepdim=True)
    return largest_R1[:, 0], sums_R1[:, 0]


def _gradient_(logits_RV: Tensor, largest_R: Tensor, sums_R: Tensor, index_R: Tensor, scale_R: Tensor) -> None:
    softmax_RV = (logits_RV.float() - largest_R[:, None]).exp() * (scale_R / sums_R)[:, None]
    columns_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    is_target_RV = columns_V == index_R[:, None]
    logits_RV.copy_(torch.where(is_target_RV, softmax_RV - scale_R[:, None], softmax_RV))


@cache
def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss compiled: once for the rows of a chunk, and once for any fewer of them."""
    return torch.compile(function)  # with fullgraph torch would stop a process that met more shapes than it keeps
