"""AdamW (arXiv 1711.05101)."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from dtrain.model.patterns import rates
from dtrain.optim import Optimizer, elementwise, groups


def build(
    *,
    model: nn.Module,
    lr: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    lr_of: Mapping[str, float] | None = None,
) -> Optimizer:
    """`weight_decay` per unit of lr, on what decays (decay.py). `lr_of`: pattern of names -> lr."""
    parts = groups(model, weight_decay=weight_decay, rates=rates(model, lr_of or {}))
    return elementwise(torch.optim.AdamW, parts, lr=lr, betas=(float(betas[0]), float(betas[1])), eps=eps)
