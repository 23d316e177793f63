"""A model of a user's own, with dropout, that knows nothing of dtrain."""

from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
