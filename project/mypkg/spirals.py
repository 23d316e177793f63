"""Points of two spirals, one turned half around, which overlap a little: a loss near zero would magnify rounding."""

import math
from typing import ClassVar

import torch
from torch import Tensor


class Spirals:
    """Sample i is always the same point."""

    classes = 2
    about: ClassVar = {"inputs": [2], "samples": 8192}
    """Read from this file before anything runs."""

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        far = torch.rand((), generator=draw).sqrt()
        angle = 3 * math.pi * far + math.pi * (index % 2)
        noise = 0.09 * torch.randn(2, generator=draw)
        return far * torch.stack([angle.cos(), angle.sin()]) + noise, index % 2
