"""Compile every block of the model."""

import importlib
from collections.abc import Sequence

import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch._functorch import config

from dtrain.compile import Compile

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes in which torch records the kernels of a graph, and replays them in the same memory."""


def build(*, mode: str) -> Compile:
    """`mode` as in torch.compile."""

    if mode in CUDA_GRAPHS and torch.cuda.is_available():
        # so that `dtrain.compile.begin` marks the first step too
        importlib.import_module("torch._inductor.cudagraph_trees")

    # the backward recomputes inputs of products from what the forward saves anyway: a third less is saved, at no cost
    # in time (tests/bench/RESULTS.md, "GPU")
    config.ban_recompute_materialized_backward = False
    # a block has no collective of ddp to overlap: torch would cut its graph at a first bucket of 1 MiB
    # (https://docs.pytorch.org/docs/stable/notes/ddp.html#torchdynamo-ddpoptimizer)
    dynamo.optimize_ddp = False

    def wrap(blocks: Sequence[nn.Module]) -> None:
        for block in blocks:
            block.compile(mode=mode)

    return wrap
