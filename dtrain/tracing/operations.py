"""Multiplications of operators that torch.utils.flop_counter does not know or counts wrongly."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def multiplications(operator: Any) -> Callable[..., int] | None:
    """The formula of an operator, of its arguments and `out_val`; None if it has none."""
    own, known = FORMULAS.get(operator), flop_registry.get(operator)
    return own or (known and (lambda *args, **kwargs: known(*args, **kwargs) // 2))


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    needed: Sequence[bool],
    **_: Any,
) -> int:
    """As many for the gradient of the input as for that of the weight, groups or not; torch leaves the groups out."""
    places = (x if transposed else gradient).shape
    return places[0] * prod(places[2:]) * weight.numel() * sum(needed[:2])


def _lstm(x: Tensor, of_input: Tensor, of_state: Tensor, *_: Any, **__: Any) -> int:
    return x.shape[:-1].numel() * (of_input.numel() + of_state.numel())


def _lstm_backward(*args: Any, **_: Any) -> int:
    return 2 * _lstm(*args)


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Only if both have a dim of groups does each group multiply as many."""
    return a.shape[-2] * a.shape[-1] * b.shape[-1] * (len(a) if a.ndim == b.ndim == 3 else 1)


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.convolution_backward: _convolution_backward,
    aten.mkldnn_rnn_layer: _lstm,
    aten.mkldnn_rnn_layer_backward: _lstm_backward,
    aten._grouped_mm: _grouped,
}
