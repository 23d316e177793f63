"""Which activations are computed again in the backward instead of being kept (arXiv 1604.06174). Every word builds a Remat.

The wrapper goes around `forward`, not around the module: names of parameters stay, and the hooks that gather parameters run outside.
Random numbers are drawn again as they were, so results are the same bit for bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

Remat = Callable[[Sequence[nn.Module]], None]
"""Changes the blocks of a model in place."""


def recompute(block: nn.Module, **options: Any) -> None:
    """Keep only the inputs of `block` for the backward."""
    inner = block.forward

    def forward(*arguments: Any, **keywords: Any) -> Any:  # torch.compile does not look into a partial
        return checkpoint(inner, *arguments, use_reentrant=False, **options, **keywords)

    block.forward = forward
