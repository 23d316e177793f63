"""Adafactor (arXiv 1804.04235): the second moment of a matrix is kept as one row and one column."""

import torch
from torch import nn

from dtrain.optim import groups


def build(*, model: nn.Module, lr: float, beta2_decay: float, d: float, weight_decay: float) -> torch.optim.Optimizer:
    """`lr` is relative to the root mean square of each weight; `d` clips the root mean square of an update."""
    return torch.optim.Adafactor(groups(model.parameters(), weight_decay=weight_decay), lr=lr, beta2_decay=beta2_decay, d=d)
