"""Whether blocks are compiled (torch.compile), each alone: equal blocks share one compilation, and wrappers stay outside of it."""

from collections.abc import Callable, Sequence

from torch import nn

Compile = Callable[[Sequence[nn.Module]], None]
"""Changes the blocks of a model in place."""
