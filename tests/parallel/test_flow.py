"""A model whose forward treats hidden states as no stage of a pipeline can is refused; what stays inside a stage is not."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from dtrain.parallel.flow import flaw
from dtrain.parallel.pipeline import Stage
from dtrain.parallel.stages import cut, emptied, stage_of


class Layer(nn.Linear):
    def forward(self, x: Tensor, *beside: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + sum(beside)


class Net(nn.Module):
    """Embedding, four blocks and a head; `run(self, x)` is what lies between."""

    pipeline: ClassVar = ("embed", "blocks", "drop", "head")

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.embed, self.blocks, self.head = (
            nn.Embedding(5, 4),
            nn.ModuleList(Layer(4, 4) for _ in range(4)),
            Layer(4, 5),
        )
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(self, x)
        out: Tensor = self.head(x)
        return out


def through(order: Callable[[list[Any]], Any]) -> Callable[[Any, Tensor], Tensor]:
    def run(self: Any, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in order(list(self.blocks)):
            x = block(x)
        return x

    return run


def skipping(*blocks: int, since: int = -1) -> Callable[[Any, Tensor], Tensor]:
    """These blocks are also given the hidden states after block `since`; -1: the embeddings."""

    def run(self: Any, x: Tensor) -> Tensor:
        x = kept = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = block(x, kept * 2) if number in blocks else block(x)
            kept = x if number == since else kept
        return x

    return run


def by_input(self: Any, x: Tensor) -> Tensor:
    """Every block is given a mask of the first input."""
    mask = (x != 0).float()
    mask = mask if mask.ndim == 3 else mask[..., None]
    x = self.embed(x)
    for block in self.blocks:
        x = block(x, mask)
    return x


def with_places(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = block(x, torch.arange(x.shape[1])[:, None] / 8)
    return x


def with_noise(self: Any, x: Tensor) -> Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = block(x, torch.rand(1))
    return x


ORDER = "run once, in the order of the table"


def dropped(self: Any, x: Tensor) -> Tensor:
    """As Phi of transformers, whose dropout stands behind its blocks and comes before them."""
    x = self.drop(self.embed(x))
    for block in self.blocks:
        x = block(x)
    return x


DEPENDS = "of stage 1 something that depends on hidden states before that stage"


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (through(lambda blocks: blocks), ""),
        (through(reversed), f"runs blocks.1 of stage 0 after blocks.2 of stage 1, but the modules of its table {ORDER}"),
        (through(lambda blocks: blocks * 2), f"runs blocks.0 of stage 0 after blocks.3 of stage 1, but the modules of its table {ORDER}"),
        (through(lambda blocks: [blocks[1], *blocks[:2], *blocks[2:]]), ""),
        (skipping(3), f"gives blocks.3 {DEPENDS}"),
        (skipping(1), ""),
        (skipping(3, since=1), ""),
        (skipping(3, since=2), ""),
        (skipping(3, since=0), f"gives blocks.3 {DEPENDS}"),
        (by_input, f"gives blocks.2 {DEPENDS}, or on its first input"),
        (with_places, ""),
        (with_noise, ""),
        (dropped, ""),
    ],
    ids=["right", "reversed", "looped", "in a stage", "embeddings", "in the first", "what flows", "in the last", "an older state", "the input", "places", "noise", "dropout"],
)  # fmt: skip
def test_a_flow_that_no_stage_has_is_named(run: Callable[[Any, Tensor], Tensor], problem: str) -> None:
    model = Net(run)
    stages = stage_of(model, cut(model, 2, "blocks"))
    empty = Stage(emptied(model), torch.no_grad)
    found = flaw(empty.model, empty, torch.randn(2, 3, 4), stages)
    assert (problem in (found or "")) if problem else found is None, found
