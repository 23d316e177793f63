"""Whether blocks are compiled (torch.compile), each alone: equal blocks share one compilation, and wrappers stay
outside of it; or, on one rank, the whole model.
"""

import sys
from collections.abc import Callable

import torch
from torch import nn

Compile = Callable[[nn.Module], None]
"""Changes a model in place."""


def begin() -> None:
    """Allow CUDA graphs to overwrite their earlier results: called before every step and every forward
    without a backward.

    Said by nobody, torch guesses: that a microbatch is a new step, while the gradients of the one before it lie in the
    graphs' memory, and that in an evaluation every block is one. Without CUDA graphs in this process nothing is
    imported, and nothing done.
    """
    if "torch._inductor.cudagraph_trees" in sys.modules:
        torch.compiler.cudagraph_mark_step_begin()
