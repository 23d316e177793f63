"""AdamW (arXiv 1711.05101)."""

from collections.abc import Sequence

import torch
from torch import nn

from dtrain.optim import Optimizer, elementwise, groups


def build(*, model: nn.Module, lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> Optimizer:
    """`weight_decay` per unit of lr, on matrices only."""
    parts = groups(model.parameters(), weight_decay=weight_decay)
    return elementwise(torch.optim.AdamW, parts, lr=lr, betas=(float(betas[0]), float(betas[1])), eps=eps)
