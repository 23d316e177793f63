"""Residual layers between points and classes."""

import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """[B, 2] -> [B, 2], the logits of the classes."""

    pipeline = ("embed", "layers", "head")
    """Its modules in the order they run: mesh.pp cuts between them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(2, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
