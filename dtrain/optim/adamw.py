"""AdamW (arXiv 1711.05101)."""

from collections.abc import Sequence

import torch
from torch import nn

from dtrain.optim import groups, kernel


def build(*, model: nn.Module, lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> torch.optim.Optimizer:
    """`weight_decay` per unit of lr, on matrices only."""
    return torch.optim.AdamW(
        groups(model.parameters(), weight_decay=weight_decay), lr=lr, betas=(betas[0], betas[1]), eps=eps, **kernel(model.parameters())
    )
