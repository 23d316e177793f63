"""Layers between inputs and classes; a model needs nothing of dtrain."""

from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn


class Net(nn.Module):
    pipeline: ClassVar = ("layers", "head")
    """Its modules in the order they run: mesh.pp cuts between the layers."""
    tp_plan: ClassVar = {"head": "colwise_gather_output"}
    """How mesh.tp splits which matrices."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = [16, *[width] * layers]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
