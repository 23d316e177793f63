"""Weights, gradients and optimizer in fp32, matrix products in float16 with a dynamic loss scale."""

import torch

from dtrain.precision import LossScale, Precision


def build(*, scale: float, growth: int) -> Precision:
    """`growth`: good steps until the scale doubles."""
    return Precision(compute=torch.float16, scale=LossScale(scale, growth=growth))
