"""Stochastic gradient descent with momentum."""

import torch
from torch import nn

from dtrain.optim import Optimizer, elementwise, groups


def build(*, model: nn.Module, lr: float, momentum: float, nesterov: bool, weight_decay: float) -> Optimizer:
    """`weight_decay` is added to the gradient of matrices."""
    parts = groups(model.parameters(), weight_decay=weight_decay)
    return elementwise(torch.optim.SGD, parts, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
