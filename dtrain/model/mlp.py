"""Fully connected layers with GELU between them."""

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Samples [B, *inputs] -> outputs [B, outputs]. `layers` hidden layers of `width`."""

    def __init__(self, *, inputs: int | Sequence[int], outputs: int, width: int, layers: int) -> None:
        super().__init__()
        sizes = [math.prod(inputs) if isinstance(inputs, Sequence) else inputs, *[width] * layers, outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        last: Tensor = self.layers[-1](x)
        return last

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Biases zero, weights normal with the gain of a rectifier (He, arXiv 1502.01852)."""
        if weight.ndim == 1:
            weight.zero_()
        else:
            weight.normal_(std=math.sqrt(2 / weight.shape[1]), generator=generator)
