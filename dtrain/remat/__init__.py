"""Which activations are computed again in the backward instead of being kept (arXiv 1604.06174). Every word builds a
Remat.

The wrapper goes around `forward`, not around the module: names of parameters stay, and the hooks that gather parameters
run outside. Random numbers are drawn again as they were, and buffers are what they were, so results are the same bit
for bit.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtrain.model import saved_buffers

Remat = Callable[[Sequence[nn.Module]], None]
"""Wraps the blocks of a model in place."""


def recompute(block: nn.Module, **options: Any) -> None:
    """Keep only the inputs of `block` for the backward.

    Keys and values that a model of transformers keeps for words to come are not among them: the block would add to them
    twice.
    """
    inner, kept = block.forward, getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    places = [(module, name) for module, name, _ in saved_buffers(block)]

    def forward(*arguments: Any, **keywords: Any) -> Any:  # torch.compile does not look into a partial
        if torch.is_grad_enabled():
            arguments = tuple(None if isinstance(each, kept) else each for each in arguments)
            keywords = {name: None if isinstance(each, kept) else each for name, each in keywords.items()}
        called = _Twice(inner, places) if places and torch.is_grad_enabled() else inner
        return checkpoint(called, *arguments, use_reentrant=False, **options, **keywords)

    block.forward = forward


def recompute_all(blocks: Sequence[nn.Module], **options: Any) -> None:
    for block in blocks:
        recompute(block, **options)


class _Twice:
    """A forward that restores buffers (BatchNorm's statistics, a codebook): recomputed, it starts from the same ones
    and changes nothing.
    """

    def __init__(self, forward: Callable[..., Any], places: Sequence[tuple[nn.Module, str]]) -> None:
        self._forward, self._places = forward, places
        self._before: list[Tensor] = []

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        now = [module._buffers[name] for module, name in self._places]
        if not self._before:
            self._before = [buffer.clone() for buffer in now if buffer is not None]
            return self._forward(*arguments, **keywords)
        self._put([buffer.clone() for buffer in self._before])
        try:
            return self._forward(*arguments, **keywords)
        finally:
            self._put(now)

    def _put(self, buffers: Sequence[Tensor | None]) -> None:
        for (module, name), buffer in zip(self._places, buffers, strict=True):
            module._buffers[name] = buffer
