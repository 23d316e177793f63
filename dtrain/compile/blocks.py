"""Compile every block of the model."""

import importlib

import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch._functorch import config

from dtrain.compile import Compile
from dtrain.model import PassThrough, blocks, tables

CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes in which torch records the kernels of a graph, and replays them in the same memory."""


def build(*, mode: str) -> Compile:
    """`mode` as in torch.compile."""
    prepare(mode)

    def wrap(model: nn.Module) -> None:
        for module in dict.fromkeys([*blocks(model), *_beside(model)]):
            module.compile(mode=mode)

    return wrap


def _beside(model: nn.Module) -> list[nn.Module]:
    """The modules in a model's table `fused`, but for those of other stages of a pipeline, and where tensor parallelism
    has split them or what is around them.
    """
    modules, names = dict(model.named_modules()), list[str]()
    for prefix, table in tables(model, "fused"):
        split = any(modules[f"{prefix}{name.split('.')[0]}"]._forward_hooks for name in table)
        names += [] if split else [f"{prefix}{name}" for name in table]
    return [modules[name] for name in names if name in modules and not isinstance(modules[name], PassThrough)]


def prepare(mode: str) -> None:
    """Set what torch's compiler does in this process."""
    if mode in CUDA_GRAPHS and torch.cuda.is_available():
        # so that `dtrain.compile.begin` marks the first step too
        importlib.import_module("torch._inductor.cudagraph_trees")

    # the backward recomputes inputs of products from what the forward saves anyway: a third less is saved, at no cost
    # in time (tests/bench/RESULTS.md, "GPU")
    config.ban_recompute_materialized_backward = False
    # a block has no collective of ddp to overlap: torch would cut its graph at a first bucket of 1 MiB
    # (https://docs.pytorch.org/docs/stable/notes/ddp.html#torchdynamo-ddpoptimizer)
    dynamo.optimize_ddp = False
