"""DoRA (arXiv 2402.09353): the rows of W + alpha / rank x B A give directions, and `magnitude` [out] their lengths."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.adapter import Adapter, LowRank, adapt, nonzero, row_lengths
from dtrain.mesh.sharding import local


def build(*, targets: Sequence[str] | None, rank: int, alpha: float, dropout: float) -> Adapter:
    """`targets`: patterns of names of linear layers, None: all of the blocks."""
    return partial(adapt, kind=Dora, word="dora", targets=targets, rank=rank, alpha=alpha, dropout=dropout)


@final
class Dora(LowRank):
    added: ClassVar[Sequence[str]] = ("lora_A", "lora_B", "magnitude")
    magnitude: nn.Parameter

    def begin(self) -> None:
        """The lengths of the rows of W, so that the layer computes what it did."""
        with torch.no_grad():
            local(self.magnitude).copy_(row_lengths(self.weight, self.magnitude))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]. No gradient goes through the lengths that are divided by (section 4.3)."""
        if self.off:
            return F.linear(input, self.weight, self.bias)
        with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
            whole = self.weight + self.scaling * (self.lora_B @ self.lora_A)
            length = nonzero(torch.linalg.vector_norm(whole, dim=1))
        rows: Tensor = F.linear(input, self.weight) + self.scaling * self.change(input)
        rows = rows * (self.magnitude / length).to(rows.dtype)
        return rows if self.bias is None else rows + self.bias
