"""A model of a user's own, with dropout, that knows nothing of dtrain."""

from typing import ClassVar

from torch import Tensor, nn


class Net(nn.Module):
    tp_plan: ClassVar = {"layers.0": "colwise_gather_output"}

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
