"""Fully connected layers with GELU between them."""

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Hidden(nn.Linear):
    """gelu(Wx + b)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


class MLP(nn.Module):
    """Samples [B, *inputs], of any numbers -> outputs [B, outputs]. `layers` hidden layers of `width`."""

    pipeline = ("layers", "head")

    def __init__(self, *, inputs: int | Sequence[int], outputs: int, width: int, layers: int) -> None:
        super().__init__()
        sizes = [math.prod(inputs) if isinstance(inputs, Sequence) else inputs, *[width] * layers, outputs]
        self.layers = nn.ModuleList(Hidden(a, b) for a, b in itertools.pairwise(sizes[:-1]))
        self.head = nn.Linear(sizes[-2], sizes[-1])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1) if x.ndim > 1 else x[:, None]
        x = x if x.is_floating_point() else x.float()
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out

    @property
    def tp_plan(self) -> dict[str, str]:
        """Every second layer by its outputs, the next by its inputs; what comes out is whole."""
        count = len(self.layers)
        styles = {f"layers.{index}": "rowwise" if index % 2 else "colwise" for index in range(count)}
        return {**styles, "head": "rowwise" if count % 2 else "colwise_gather_output"}

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Biases zero, weights normal with the gain of a rectifier (He, arXiv 1502.01852)."""
        if weight.ndim == 1:
            weight.zero_()
        else:
            weight.normal_(std=math.sqrt(2 / weight.shape[1]), generator=generator)
