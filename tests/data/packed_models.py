"""Models for packed rows: filled so that no attention is zero, and such as mix documents."""

from typing import Any

import torch
from small import small_gpt
from torch import Tensor, nn

from dtrain.model.moe import MoE


def filled(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def gpt() -> nn.Module:
    return small_gpt(heads=4, kv_heads=2, width=16)


def moe() -> nn.Module:
    return filled(MoE(vocab=13, layers=2, heads=4, kv_heads=2, width=16, hidden=12, experts=4, active=2, balance=0.0))


def llama() -> nn.Module:
    from parallel.test_huggingface import model

    torch.manual_seed(0)
    return filled(model(kind="Llama", config={"vocab_size": 13}))


class Plain(nn.Module):
    """No position_ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))  # type: ignore[no-any-return]


class Forgets(nn.Module):
    """It takes positions, and attends to all that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = small_gpt()

    def forward(self, input_ids: Tensor, **others: Any) -> Tensor:
        return self.gpt(input_ids)  # type: ignore[no-any-return]


class Carries(Plain):
    """A state that goes on from one document to the next."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.head(self.embed(input_ids).cumsum(1))  # type: ignore[no-any-return]
