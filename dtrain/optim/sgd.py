"""Stochastic gradient descent with momentum."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtrain.model.patterns import rates
from dtrain.optim import Optimizer, elementwise, groups, inner


def build(
    *,
    model: nn.Module,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    lr_of: Mapping[str, float] | None = None,
) -> Optimizer:
    """`weight_decay` is added to the gradient of what decays (decay.py). `lr_of`: pattern of names -> lr."""
    parts = groups(model, weight_decay=weight_decay, rates=rates(model, lr_of or {}))
    optimizer = elementwise(torch.optim.SGD, parts, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    if momentum:
        for part in inner(optimizer):
            part.register_step_pre_hook(_begin)
    return optimizer


def _begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A momentum of zeros for each weight that has its first gradient, which makes it that gradient.

    torch 2.13's fused kernel raises TypeError in a step in which some weights have a momentum and others do not.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len(optimizer.state) < len(parameters):
        for parameter in parameters:
            if parameter.grad is not None and not optimizer.state.get(parameter):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
