"""Parts of a user's own: a dataset that says which sample it gave, a model that writes down what it was given, and parts that draw random numbers."""

import json
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Numbered:
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor([1.0])


class Jitter(Numbered):
    """Augmented with the generators of Python, numpy and torch."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(4) + random.random() + float(np.random.rand()), torch.tensor([index / self.length])


class Sees(nn.Module):
    """A line for every forward of the training: the samples in it, in the order they came."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with Path(os.environ["SEEN"], os.environ.get("RANK", "0")).open("a") as file:
                file.write(json.dumps([int(value) for value in x.flatten()]) + "\n")
        return self.layer(x / 100)


class Draws(nn.Module):
    """Drops out, and shifts its answer by what Python and numpy draw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.3, self.training)) * (1 + random.random()) + float(np.random.rand())


class Normed(nn.Sequential):
    """With running statistics, which are buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
