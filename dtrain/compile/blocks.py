"""Compile every block of the model."""

from collections.abc import Sequence

from torch import nn

from dtrain.compile import Compile


def build(*, mode: str) -> Compile:
    """`mode` as in torch.compile."""

    def wrap(blocks: Sequence[nn.Module]) -> None:
        for block in blocks:
            block.compile(mode=mode)

    return wrap
