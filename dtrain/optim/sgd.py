"""Stochastic gradient descent with momentum."""

import torch
from torch import nn

from dtrain.optim import groups, kernel


def build(*, model: nn.Module, lr: float, momentum: float, nesterov: bool, weight_decay: float) -> torch.optim.Optimizer:
    """`weight_decay` is added to the gradient of matrices."""
    return torch.optim.SGD(
        groups(model.parameters(), weight_decay=weight_decay),
        lr=lr,
        momentum=momentum,
        nesterov=nesterov and momentum > 0,
        **kernel(model.parameters()),
    )
