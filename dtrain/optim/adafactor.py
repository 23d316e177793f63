"""Adafactor (arXiv 1804.04235): the second moment of a matrix is kept as one row and one column.

The update of torch.optim.Adafactor, which fails on sharded parameters; here the few sums that cross shards are two all-reduces a
step, and nothing waits for the device.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.optim import groups
from dtrain.sharding import like, local, shard_group, sum_over

LEAST_RMS = 1e-3
"""A weight whose root mean square is smaller moves as if it had this one (eps2 of the paper)."""


def build(*, model: nn.Module, lr: float, beta2_decay: float, d: float, weight_decay: float) -> torch.optim.Optimizer:
    """`lr` is relative to the root mean square of each weight; `d` clips the root mean square of an update."""
    return Adafactor(groups(model.parameters(), weight_decay=weight_decay), lr=lr, beta2_decay=beta2_decay, d=d)


class Adafactor(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[dict[str, Any]], *, lr: float, beta2_decay: float, d: float) -> None:
        super().__init__(parameters, {"lr": lr, "beta2_decay": beta2_decay, "d": d, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        ranks = shard_group(parameters[0])
        for parameter in parameters:
            _begin(self.state[parameter], parameter)
            self.state[parameter]["step"] += 1
        # first sums: squares of the weights, of the gradient's columns, and the row means before and after this step
        first = [part for parameter in parameters for part in _first_sums(parameter)]
        first = _split(sum_over(ranks, torch.cat(first)), first)
        updates = []
        for index, parameter in enumerate(parameters):
            forget = float(self.state[parameter]["step"]) ** group["beta2_decay"]
            updates.append(_direction(parameter, self.state[parameter], first[2 * index + 1], forget))
        # second sums: the row means of the variance, then squares of the updates
        rows = sum_over(ranks, torch.stack([scale_sum for _, scale_sum, _ in updates]))
        finished = [
            direction * (rows[index] / count).clamp(min=_eps(direction)).sqrt() if count else direction
            for index, (direction, _, count) in enumerate(updates)
        ]
        squares = sum_over(ranks, torch.stack([update.square().sum() for update in finished]))
        for index, (parameter, update) in enumerate(zip(parameters, finished, strict=True)):
            count = parameter.numel()
            pace = min(group["lr"], float(self.state[parameter]["step"]) ** -0.5)
            alpha = (first[2 * index] / count).sqrt().clamp(min=LEAST_RMS) * pace
            clipped = ((squares[index] / count).sqrt() / group["d"]).clamp(min=1.0)
            weight = local(parameter)
            weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update * (alpha / clipped))


def _begin(state: dict[str, Any], parameter: Tensor) -> None:
    if state:
        return
    piece = local(parameter)
    state["step"] = torch.zeros(())
    if parameter.ndim > 1:
        shape = torch.Size([*parameter.shape[:-1], 1])
        state["row_var"] = like(piece.new_zeros(*piece.shape[:-1], 1), parameter, shape)
        columns = [*piece.shape[:-2], 1, piece.shape[-1]]
        # the columns of a matrix sharded by rows are the same on every rank; of a deeper tensor each rank has its own
        whole = parameter.ndim == 2
        state["col_var"] = (
            piece.new_zeros(columns)
            if whole
            else like(piece.new_zeros(columns), parameter, torch.Size([*parameter.shape[:-2], 1, parameter.shape[-1]]))
        )
    else:
        state["variance"] = torch.zeros_like(parameter)


def _first_sums(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of the sum of squares of the weight, and of each column of a matrix's gradient."""
    assert parameter.grad is not None
    columns = local(parameter.grad).square().sum(0) if parameter.ndim == 2 else local(parameter).new_zeros(0)
    return local(parameter).square().sum().view(1), columns


def _direction(parameter: Tensor, state: dict[str, Any], columns: Tensor, forget: float) -> tuple[Tensor, Tensor, int]:
    """(gradient / sqrt(row x column), this rank's sum of row variances, how many rows there are in all).

    The mean of the rows is still missing under the root; 0 rows means that nothing is missing.
    """
    assert parameter.grad is not None
    gradient = local(parameter.grad)
    floor = _eps(gradient) ** 2
    nothing = gradient.new_zeros(())
    if parameter.ndim == 1 or parameter.ndim == 0:
        variance = local(state["variance"]).lerp_(gradient.square(), forget)
        return gradient * variance.clamp(min=floor).rsqrt(), nothing, 0
    row = local(state["row_var"]).lerp_(gradient.square().mean(-1, keepdim=True), forget)
    if parameter.ndim == 2:
        column = state["col_var"].lerp_((columns / parameter.shape[0]).view(1, -1), forget)
        return gradient * (row @ column).clamp(min=floor).rsqrt(), row.sum(), parameter.shape[0]
    column = local(state["col_var"]).lerp_(gradient.square().mean(-2, keepdim=True), forget)
    estimate = row @ column / row.mean(-2, keepdim=True).clamp(min=_eps(gradient))
    return gradient * estimate.clamp(min=floor).rsqrt(), nothing, 0


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps


def _split(flat: Tensor, shapes: list[Tensor]) -> list[Tensor]:
    return list(flat.split([part.numel() for part in shapes]))
