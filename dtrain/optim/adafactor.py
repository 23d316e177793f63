"""Adafactor (arXiv 1804.04235): the second moment of a matrix is kept as one row and one column.

The update of torch.optim.Adafactor, which fails on sharded parameters; here the few sums that cross shards are three
all-reduces a step for each axis that splits them, and nothing waits for the device. They are summed in fp32 whatever
the weights are in.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.mesh.sharding import like, local, sum_pieces
from dtrain.model.patterns import rates
from dtrain.optim import ByGroup, groups
from dtrain.optim.norms import norm

LEAST_RMS = 1e-3
"""A weight whose root mean square is smaller moves as if it had this one (eps2 of the paper)."""


def build(
    *,
    model: nn.Module,
    lr: float,
    beta2_decay: float,
    d: float,
    weight_decay: float,
    lr_of: Mapping[str, float] | None = None,
) -> torch.optim.Optimizer:
    """`lr` is relative to the root mean square of each weight; `d` clips the root mean square of an update;
    `lr_of`: pattern of names -> lr. Raises WordsError for complex weights.
    """
    odd = next((name for name, p in model.named_parameters() if p.is_complex() and p.requires_grad), None)
    if odd:
        raise WordsError(
            f"optim=adafactor: {odd} holds complex numbers, which have no row and column means. Type optim=adamw."
        )
    parts = groups(model, weight_decay=weight_decay, rates=rates(model, lr_of or {}))
    return Adafactor(parts, lr=lr, beta2_decay=beta2_decay, d=d)


class Adafactor(ByGroup):
    def __init__(self, parameters: Iterable[dict[str, Any]], *, lr: float, beta2_decay: float, d: float) -> None:
        super().__init__(parameters, {"lr": lr, "beta2_decay": beta2_decay, "d": d, "weight_decay": 0.0})

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            _begin(state, parameter)
            state["step"] += 1
        weights, totals = self._averages(parameters, group["beta2_decay"])
        updates = [_direction(*each) for each in zip(parameters, states, totals, strict=True)]
        pairs = zip(updates, parameters, strict=True)
        lengths = sum_pieces((_square(update), parameter, None) for update, parameter in pairs)
        for parameter, state, update, weight, length in zip(parameters, states, updates, weights, lengths, strict=True):
            pace = min(group["lr"], float(state["step"]) ** -0.5)
            alpha = (weight / parameter.numel()).sqrt().clamp(min=LEAST_RMS) * pace
            clipped = ((length / parameter.numel()).sqrt() / group["d"]).clamp(min=1.0)
            local(parameter).mul_(1 - group["lr"] * group["weight_decay"]).sub_(update * (alpha / clipped))

    def _averages(self, parameters: list[Tensor], decay: float) -> tuple[list[Tensor], list[Tensor | None]]:
        """Take the gradients into the running means; of each parameter the sum of its squares, and of a matrix that of
        its row means.
        """
        matrices = [parameter for parameter in parameters if parameter.ndim > 1]
        own = [(_square(local(parameter)), parameter, None) for parameter in parameters]
        both = [(_square(_gradient(matrix), dim), matrix, dim) for matrix in matrices for dim in (-1, -2)]
        sums = sum_pieces([*own, *both])
        means = iter(sums[len(own) :])
        for parameter in parameters:
            state = self.state[parameter]
            forget = float(state["step"]) ** decay
            if parameter.ndim < 2:
                local(state["variance"]).lerp_(_gradient(parameter).square(), forget)
                continue
            for name, dim in (("row_var", -1), ("col_var", -2)):
                mean = local(state[name])
                mean.lerp_((next(means) / parameter.shape[dim]).to(mean.dtype), forget)
        rows = (local(self.state[matrix]["row_var"]).to(_wide(matrix)).sum(-2, keepdim=True) for matrix in matrices)
        totals = iter(sum_pieces((row, matrix, -2) for row, matrix in zip(rows, matrices, strict=True)))
        return sums[: len(own)], [next(totals) if parameter.ndim > 1 else None for parameter in parameters]


def _begin(state: dict[str, Any], parameter: Tensor) -> None:
    if state:
        return
    piece = local(parameter)
    state["step"] = torch.zeros(())
    if parameter.ndim < 2:
        state["variance"] = torch.zeros_like(parameter)
        return
    state["row_var"] = like(piece.new_zeros(*piece.shape[:-1], 1), parameter, parameter.ndim - 1)
    state["col_var"] = like(piece.new_zeros(*piece.shape[:-2], 1, piece.shape[-1]), parameter, parameter.ndim - 2)


def _direction(parameter: Tensor, state: dict[str, Any], total: Tensor | None) -> Tensor:
    """The gradient over the root of its second moment; `total` is the sum of the row means of a matrix."""
    eps = torch.finfo(parameter.dtype).eps
    if total is None:
        moment = local(state["variance"]).to(_wide(parameter))
    else:
        row, column = (local(state[name]).to(_wide(parameter)) for name in ("row_var", "col_var"))
        moment = (row / (total / parameter.shape[-2]).clamp(min=eps)) @ column
    return _gradient(parameter) * moment.clamp(min=eps**2).rsqrt()


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _square(tensor: Tensor, dim: int | None = None) -> Tensor:
    """The sum of squares of a tensor, or along one of its dims."""
    if dim is None:
        return norm(tensor, _wide(tensor)).square()
    length: Tensor = torch.linalg.vector_norm(tensor, dim=dim, keepdim=True, dtype=_wide(tensor))
    return length.square()


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
