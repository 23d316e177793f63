"""Compile the whole model: one graph, in which nothing is written and read again between blocks.

On one rank: strategies gather weights and reduce gradients around blocks, and parallelism communicates between them.
"""

from torch import nn

from dtrain.compile import Compile
from dtrain.compile.blocks import prepare


def build(*, mode: str) -> Compile:
    """`mode` as in torch.compile."""
    prepare(mode)

    def wrap(model: nn.Module) -> None:
        model.compile(mode=mode)

    return wrap
