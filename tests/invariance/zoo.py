"""Models that know nothing of dtrain: a plain Hugging Face Llama, a user's module, and a Sequential."""

from typing import Any

import torch
from torch import Tensor, nn


def llama(*, vocab: int = 29) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


class Answer:
    """What some models return in place of a tensor."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Plain(nn.Module):
    """Features [B, 64] -> [B, 10] by layers of several kinds, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.inner = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)) for _ in range(3))
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        x = x * self.scale
        for layer in (*self.inner, self.inner[0]):
            x = x + layer(x)
        return Answer(self.out(x))


def sequential() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 10))


class Uneven:
    """Sixteen tokens, of which sample i has i % 16 targets that do not count: a mean of means, or of halves, is wrong."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randint(29, (17,), generator=torch.Generator().manual_seed(index))
        return row[:-1], torch.where(torch.arange(16) < index % 16, -100, row[1:])
