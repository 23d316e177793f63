"""Weights, gradients and optimizer in fp32, matrix products in bfloat16."""

import torch

from dtrain.precision import Precision


def build() -> Precision:
    return Precision(compute=torch.bfloat16)
