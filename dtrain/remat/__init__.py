"""Which activations are computed again in the backward instead of being kept (arXiv 1604.06174). Every word builds a Remat.

The wrapper goes around `forward`, not around the module: names of parameters stay, and the hooks that gather parameters run outside.
Random numbers are drawn again as they were, so results are the same bit for bit.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Remat = Callable[[Sequence[nn.Module]], None]
"""Changes the blocks of a model in place."""


def recompute(block: nn.Module, **options: Any) -> None:
    """Keep only the inputs of `block` for the backward.

    Keys and values that a model of transformers keeps for words to come are not among them: the block would add to them twice.
    """
    inner, kept = block.forward, getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())

    def forward(*arguments: Any, **keywords: Any) -> Any:  # torch.compile does not look into a partial
        if torch.is_grad_enabled():
            arguments = tuple(None if isinstance(each, kept) else each for each in arguments)
            keywords = {name: None if isinstance(each, kept) else each for name, each in keywords.items()}
        return checkpoint(inner, *arguments, use_reentrant=False, **options, **keywords)

    block.forward = forward
