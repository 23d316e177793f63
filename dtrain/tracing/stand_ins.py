"""Operators that stand in for others in a trace: they leave what those keep, and compute nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BINCOUNT = torch.ops.aten.bincount.default
LSTM = torch.ops.aten.mkldnn_rnn_layer.default
Expect = Callable[[Tensor], Tensor]
"""Makes the gradient of a weight."""


def confusion(numbers: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """torch.bincount without values, which objectives use for a confusion matrix; assumes a result of `minlength`."""
    return numbers.new_empty(minlength, dtype=torch.int64) if minlength else BINCOUNT(numbers, weights)


def lstm(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """A layer of an LSTM with the workspace of oneDNN, which torch's own stand-in leaves out. Its size was found by
    measurement, without the padding of rows: gates and states of each step; twice, states and cells, of which there is
    one more, and their gradients.
    """
    *outputs, workspace = LSTM(x, *args)
    hidden = outputs[0].shape[-1]
    steps, samples, width = len(x), x.shape[1], max(x.shape[-1], hidden)
    size = samples * (steps * 5 * hidden + (steps + 1) * (4 * hidden + 6 * width))
    return *outputs, workspace.new_empty(size * x.itemsize)


def grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """torch._grouped_mm of any dtype; torch's own stand-in allows only what a GPU multiplies."""
    by_dim, by_offset = a.shape[:-2], () if offs is None else offs.shape
    groups = (by_dim or by_offset) if a.ndim == b.ndim else ()
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


STAND_INS = {BINCOUNT: confusion, LSTM: lstm, torch.ops.aten._grouped_mm.default: grouped}


def normalized(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm, which refuses a single value per channel in training, since its variance updates no buffer: a trace
    has one sample, the run more.
    """
    if training and x.numel() == x.shape[1]:
        for buffer in (mean, variance):
            if buffer is not None:
                buffer.add_(0)
        mean = variance = None
    return torch.batch_norm(x, weight, bias, mean, variance, training, momentum, eps, torch.backends.cudnn.enabled)


class HeadLoss(torch.autograd.Function):
    """Zeros, `count` of them or one number, with the gradients of a head and its loss, which keeps the input or, if it
    is one number, the gradient of the input in the type of the `product`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, count: int, product: torch.dtype, expect: Expect
    ) -> Tensor:
        ctx.save_for_backward(hidden if count else hidden.to(product), weight, bias)
        ctx.dtype, ctx.expect = hidden.dtype, expect
        return hidden.new_zeros([count] if count else [], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept, *weights = ctx.saved_tensors
        of_hidden, *needed = ctx.needs_input_grad[:3]
        made = (ctx.expect(each) if need else None for each, need in zip(weights, needed, strict=True))
        return (torch.zeros_like(kept, dtype=ctx.dtype) if of_hidden else None, *made, None, None, None)


class FusedNorm(torch.autograd.Function):
    """RMS norm by the one operator that a GPU has for it, which saves its input and a number for each row
    (`_fused_rms_norm` in tools/autograd/derivatives.yaml of torch).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: Sequence[int], expect: Expect) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        ctx.expect = expect
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        of_x, of_weight, *_ = ctx.needs_input_grad
        return torch.empty_like(x) if of_x else None, ctx.expect(weight) if of_weight else None, None, None
