"""Compile every block of the model."""

import importlib
from collections.abc import Sequence

import torch
from torch import nn

from dtrain.compile import Compile

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes in which torch records the kernels of a graph, and replays them in the same memory."""


def build(*, mode: str) -> Compile:
    """`mode` as in torch.compile."""

    if mode in CUDA_GRAPHS and torch.cuda.is_available():
        importlib.import_module(
            "torch._inductor.cudagraph_trees"
        )  # so that `dtrain.compile.begin` speaks before the first step too

    def wrap(blocks: Sequence[nn.Module]) -> None:
        for block in blocks:
            block.compile(mode=mode)

    return wrap
