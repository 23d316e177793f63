"""none: blocks run as they are written."""

import torch
from torch import Tensor, nn

from dtrain.compile.none import build


class Asking(nn.Module):
    """Remembers whether it was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.compiled = nn.Linear(2, 2), False

    def forward(self, x: Tensor) -> Tensor:
        self.compiled = torch.compiler.is_compiling()
        out: Tensor = self.linear(x)
        return out


def test_nothing_is_compiled() -> None:
    blocks = nn.Sequential(Asking(), Asking())
    build()(blocks)
    for block in blocks:
        block(torch.ones(1, 2))
        assert not block.compiled
