"""A small residual network (arXiv 1603.05027) with group norm (arXiv 1803.08494): its numbers do not depend on the
microbatch.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(channels, 8), channels)


class Residual(nn.Module):
    """[B, channels_in, H, W] -> [B, channels_out, H / stride, W / stride], with a stride for each."""

    def __init__(self, channels_in: int, channels_out: int, stride: tuple[int, int]) -> None:
        super().__init__()
        self.norm1, self.conv1 = norm(channels_in), nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = norm(channels_out), nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        same = channels_in == channels_out and stride == (1, 1)
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x_BCHW)))
        out: Tensor = self.shortcut(x_BCHW) + self.conv2(F.relu(self.norm2(y)))
        return out


class Head(nn.Module):
    """[B, channels, H, W] -> [B, outputs]: the mean over the image, through one linear layer."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.norm, self.linear = norm(channels), nn.Linear(channels, outputs)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.linear(F.relu(self.norm(x_BCHW)).mean((2, 3)))
        return logits


class CNN(nn.Module):
    """Images [B, channels, H, W] -> logits [B, outputs]. Stage i has `width` x 2^i channels and, after the first, half
    the image.
    """

    pipeline = ("stem", "blocks", "head")

    def __init__(self, *, inputs: Sequence[int], outputs: int, width: int, stages: int, blocks: int) -> None:
        super().__init__()
        if len(inputs) != 3:
            raise ValueError(f"model.inputs={list(inputs)} must be [channels, height, width]")
        self.stem = nn.Conv2d(inputs[0], width, 3, 1, 1, bias=False)
        channels, parts, (height, breadth) = width, [], inputs[1:]
        for stage in range(stages):
            wider = width * 2**stage
            # a side of one stays: the same numbers, and torch 2.14 on the CPU has wrong gradients for a stride of 2
            # over one column in bf16
            stride = (1 if height == 1 else 2, 1 if breadth == 1 else 2) if stage else (1, 1)
            height, breadth = -(-height // stride[0]), -(-breadth // stride[1])
            if wider // math.gcd(wider, 8) * height * breadth < 2:  # whose norm is zero
                raise ValueError(
                    f"of an image {list(inputs)} stage {stage + 1} of {wider} channels leaves one number to each "
                    "group. Use fewer stages or more channels"
                )
            for block in range(blocks):
                parts.append(Residual(channels, wider, (1, 1) if block else stride))
                channels = wider
        self.blocks = nn.ModuleList(parts)
        self.head = Head(channels, outputs)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = self.stem(x_BCHW)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Norms one, biases and the last convolution of each block zero, weights normal with the gain of a
        rectifier.
        """
        if "norm" in name and name.endswith("weight"):
            weight.fill_(1.0)
        elif weight.ndim == 1 or name.endswith("conv2.weight"):
            weight.zero_()
        else:
            weight.normal_(std=math.sqrt(2 / weight[0].numel()), generator=generator)
