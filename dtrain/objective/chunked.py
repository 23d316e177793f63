"""Cross entropy of deferred logits: the head's product, a chunk of tokens at a time, so that no more logits ever exist.

Of a sum the gradients of hidden states and weight are formed with the chunk in the forward, as in Liger
(https://github.com/linkedin/Liger-Kernel), so nothing is multiplied twice. Where each token has a gradient of its own,
and where a backward does not follow its forward at once or runs in two parts, chunks are computed again in it.

Shapes: N tokens, C width, V this rank's part of the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.data import IGNORE
from dtrain.errors import WordsError
from dtrain.mesh.sharding import offset
from dtrain.objective import check_targets, fused, head
from dtrain.objective.head import Deferred, local_parts
from dtrain.predict.chunks import rows_for


def token_nats(logits: Deferred, targets: Tensor) -> Tensor:
    """Cross entropy of each target [...], in nats and fp32, 0 where it is IGNORE; the same on all ranks of a split
    vocabulary. Raises WordsError for a target outside of the vocabulary.
    """
    return _apply(_Each, logits, targets).view(targets.shape)


def cross_entropy(logits: Deferred, targets: Tensor) -> Tensor:
    """The same, summed; 0-dim."""
    # unscaled gradients would be too small for fp16
    again = logits.options.again or logits.dtype == torch.float16 or not torch.is_grad_enabled()
    return token_nats(logits, targets).sum() if again else _apply(_Sum, logits, targets)


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of it: from `first` on, of `whole` tokens, split over `group`; `rows` tokens are a chunk, whose
    matrices are multiplied in `product`. `compiled`: what lies between these products is. `weight`: as in LossOptions.
    """

    first: int
    whole: int
    group: dist.ProcessGroup | None
    rows: int
    product: torch.dtype
    compiled: bool
    weight: Tensor | None

    def chunks(self, count: int) -> Iterator[slice]:
        return (slice(first, first + self.rows) for first in range(0, count, self.rows))


def _apply(function: Any, logits: Deferred, targets: Tensor) -> Tensor:
    hidden, matrix, bias = local_parts(logits)
    if logits.loss is not None:
        return logits.loss(hidden, matrix, bias, targets.numel() * (function is _Each), function is _Each)
    group = logits.weight.device_mesh.get_group() if isinstance(logits.weight, DTensor) else None
    compiled = logits.options.compiled and hidden.device.type not in head.WRITTEN
    whole, rows = logits.shape[-1], logits.options.chunk
    if isinstance(rows, str):
        rows = rows_for(
            targets.numel(), width=hidden.shape[-1], vocabulary=-(-whole // (group.size() if group else 1)),
            bytes=logits.dtype.itemsize, device=hidden.device.type,
        )  # fmt: skip
    first, weight = offset(logits.weight)[0], logits.options.weight
    vocabulary = Vocabulary(first, whole, group, rows, product=logits.dtype, compiled=compiled, weight=weight)
    try:
        with torch.autocast(hidden.device.type, enabled=False):  # the types are chosen here, as in the backward
            nats: Tensor = function.apply(hidden.flatten(0, -2), matrix, bias, targets.flatten(), vocabulary)
            return nats
    except (IndexError, RuntimeError):
        check_targets(targets, whole)
        raise


class Chunks:
    """The tokens in order, with hidden states, weight and bias in the type of the products."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: Vocabulary) -> None:
        self._hidden, self._how = hidden.to(how.product), how
        self.weight_VC = weight.to(how.product)
        self._bias = None if bias is None else bias.to(how.product)
        index = targets - how.first
        self._here = (index >= 0) & (index < len(weight))
        counts = targets != IGNORE
        # gather refuses these itself, so a GPU need not be synchronised to check them
        outside = counts & ((targets < 0) | (targets >= how.whole))
        self._taken, self._index = index.where(self._here | outside, 0), index.where(self._here, -1)
        self.counts = counts.float()

    def logits(self, rows: slice) -> tuple[Tensor, Tensor]:
        """(hidden states, logits) of a chunk, in the type of the products."""
        x_RC = self._hidden[rows]
        return x_RC, F.linear(x_RC, self.weight_VC, self._bias)

    def nats_(self, rows: slice, logits_RV: Tensor, scale: Tensor) -> Tensor:
        """Cross entropy of each token of a chunk; `logits_RV` becomes the gradient of their sum, times `scale`."""
        if self._how.group is None:
            targets_R, index_R, counts_R = self._targets(rows, logits_RV), self._index[rows], self.counts[rows]
            compiled = self._how.compiled
            return fused.nats_(logits_RV, targets_R, index_R, counts_R=counts_R, scale=scale, compiled=compiled)
        nats_R, sums_2R = self.nats(rows, logits_RV)
        self.gradient_(rows, logits_RV, sums_2R, scale)
        return nats_R

    def nats(self, rows: slice, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """(cross entropy of each token of a chunk; the largest logit and the sum of the exponentials of what logits are
        below it [2, R], of the whole vocabulary).
        """
        group, (largest_R, sums_R) = self._how.group, fused.sums(logits_RV, compiled=self._how.compiled)
        if group is not None:
            mine_R, largest_R = largest_R, largest_R.clone()
            dist.all_reduce(largest_R, op=dist.ReduceOp.MAX, group=group)
            sums_R = sums_R * (mine_R - largest_R).exp()
        below_R = (self._targets(rows, logits_RV) - largest_R).where(self._index[rows] >= 0, 0.0)
        both_2R = torch.stack((sums_R, below_R))
        if group is not None:
            dist.all_reduce(both_2R, group=group)
        sums_R, below_R = both_2R
        return (sums_R.log() - below_R) * self.counts[rows], torch.stack((largest_R, sums_R))

    def gradient_(self, rows: slice, logits_RV: Tensor, sums_2R: Tensor, scale: Tensor) -> None:
        """`logits_RV` becomes the gradient of the tokens of a chunk, times `scale`, of each or 0-dim."""
        (largest_R, sums_R), scale_R = sums_2R, scale * self.counts[rows]
        fused.gradient_(logits_RV, largest_R, sums_R, self._index[rows], scale_R, compiled=self._how.compiled)

    def _targets(self, rows: slice, logits_RV: Tensor) -> Tensor:
        """The logits of the targets in this part of the vocabulary, or any number, in fp32."""
        if not logits_RV.shape[1]:  # the vocabulary has fewer tokens than there are ranks
            return self.counts[rows]
        return logits_RV.gather(1, self._taken[rows, None])[:, 0].float()


class Gradients:
    """Those of hidden states, weight and bias, of which some are `needed`, gathered over the chunks: in the type of the
    products, those of weight and bias in fp32.
    """

    def __init__(self, hidden: Tensor, needed: tuple[bool, ...], product: torch.dtype) -> None:
        self._needed = needed
        self.hidden = torch.empty_like(hidden, dtype=product) if needed[0] else None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def add(self, rows: slice, x_RC: Tensor, gradient_RV: Tensor, weight_VC: Tensor) -> None:
        if self.hidden is not None:
            torch.mm(gradient_RV, weight_VC, out=self.hidden[rows])
        if self._needed[1]:
            self.weight = wide_product(self.weight, gradient_RV.T, x_RC)
        if self._needed[2]:
            bias_V = gradient_RV.float().sum(0)
            self.bias = bias_V if self.bias is None else self.bias.add_(bias_V)

    def every(self) -> list[Tensor | None]:
        return [self.hidden, self.weight, self.bias]


def wide_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """`total` in fp32, if there is one, plus a @ b: in its place, and on an NVIDIA GPU without a product in 16 bits."""
    if a.dtype == torch.float32:
        return a @ b if total is None else total.addmm_(a, b)
    if not writes_wide(a.device.type):
        return (a @ b).float() if total is None else total.add_(a @ b)
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def writes_wide(device: str) -> bool:
    """Whether products of matrices in 16 bits can be written in fp32 (https://github.com/pytorch/pytorch/pull/150812).
    ROCm refuses them.
    """
    return device == "cuda" and torch.version.hip is None


def _is_same(one: Tensor, other: Tensor | None) -> bool:
    """Whether both are one number in memory, which is known without reading it."""
    return other is not None and one.data_ptr() == other.data_ptr()


def _check_once(gradients: Any) -> None:
    """Raises WordsError where gradients are asked for twice, or are to have gradients themselves: chunks are gone."""
    if gradients is None or torch.is_grad_enabled():
        raise WordsError(
            "objective: it takes gradients of the loss itself, or gradients of gradients. A loss in chunks forms each "
            "gradient once. Type objective.chunk=0 to compute all logits at once."
        )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, bias: Tensor | None, targets_N: Tensor, how: Vocabulary
    ) -> Tensor:
        chunks = Chunks(hidden_NC, weight_VC, bias, targets_N, how)
        gradients = Gradients(hidden_NC, ctx.needs_input_grad, how.product)
        total = hidden_NC.new_zeros((), dtype=torch.float32)
        scale = torch.ones_like(total) if how.weight is None else how.weight

        def add(rows: slice) -> Tensor:  # in which a chunk ends before the next begins
            x_RC, logits_RV = chunks.logits(rows)
            nats_R = chunks.nats_(rows, logits_RV, scale)
            gradients.add(rows, x_RC, logits_RV, chunks.weight_VC)
            return nats_R.sum()

        for rows in how.chunks(len(hidden_NC)):
            total += add(rows)
        ctx.gradients, ctx.weight = gradients.every(), how.weight
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        _check_once(ctx.gradients)
        gradients, ctx.gradients = ctx.gradients, None
        if not _is_same(scale, ctx.weight):
            scale = scale if ctx.weight is None else scale / ctx.weight
            gradients = [each if each is None else each.mul_(scale) for each in gradients]
        return (*gradients, None, None)


class _Each(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, weight_VC: Tensor, bias: Tensor | None, targets_N: Tensor, how: Vocabulary
    ) -> Tensor:
        chunks = Chunks(hidden_NC, weight_VC, bias, targets_N, how)
        nats_N = hidden_NC.new_empty(len(hidden_NC), dtype=torch.float32)
        sums_2N = nats_N.new_empty((2, len(nats_N)))
        for rows in how.chunks(len(hidden_NC)):
            nats_N[rows], sums_2N[:, rows] = chunks.nats(rows, chunks.logits(rows)[1])
        ctx.save_for_backward(hidden_NC, weight_VC, bias, targets_N, sums_2N)
        ctx.how = how
        return nats_N

    @staticmethod
    def backward(ctx: Any, scale_N: Tensor) -> tuple[Tensor | None, ...]:
        _check_once(ctx.how)
        hidden_NC, weight_VC, bias, targets_N, sums_2N = ctx.saved_tensors
        chunks = Chunks(hidden_NC, weight_VC, bias, targets_N, ctx.how)
        gradients = Gradients(hidden_NC, ctx.needs_input_grad, ctx.how.product)

        def add(rows: slice) -> None:
            x_RC, logits_RV = chunks.logits(rows)
            chunks.gradient_(rows, logits_RV, sums_2N[:, rows], scale_N[rows])
            gradients.add(rows, x_RC, logits_RV, chunks.weight_VC)

        for rows in ctx.how.chunks(len(hidden_NC)):
            add(rows)
        return (*gradients.every(), None, None)
