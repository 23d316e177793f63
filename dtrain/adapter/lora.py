"""LoRA (arXiv 2106.09685): y = W x + alpha / rank x B A x, of which A and B are trained."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, final

import torch.nn.functional as F
from torch import Tensor

from dtrain.adapter import Adapter, LowRank, adapt


def build(*, targets: Sequence[str] | None, rank: int, alpha: float, dropout: float) -> Adapter:
    """`targets`: patterns of names of linear layers, None: all of the blocks."""
    return partial(adapt, kind=Lora, word="lora", targets=targets, rank=rank, alpha=alpha, dropout=dropout)


@final
class Lora(LowRank):
    added: ClassVar[Sequence[str]] = ("lora_A", "lora_B")

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        out = F.linear(input, self.weight, self.bias)
        return out if self.off else out + self.scaling * self.change(input)
