"""Models that know nothing of dtrain: a plain Hugging Face Llama, a user's module, and a Sequential."""

from pathlib import Path
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
        self.inner = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64)) for _ in range(3)
        )
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Any:
        x = x * self.scale
        for layer in (*self.inner, self.inner[0]):
            x = x + layer(x)
        return Answer(self.out(x))


class Judge(nn.Module):
    """Computes its loss in its forward, as the models of many scripts do, and returns that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x), y)


def sequential() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 10))


class Uneven:
    """Sixteen tokens, of which sample i has i % 16 targets that do not count: a mean of means, or of halves, is wrong."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randint(29, (17,), generator=torch.Generator().manual_seed(index))
        return row[:-1], torch.where(torch.arange(16) < index % 16, -100, row[1:])


def mixtral(*, vocab: int = 29, router: bool = True) -> nn.Module:
    """Tokens -> logits, and with `router` an `aux_loss` that keeps its experts equally busy."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=vocab, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            num_local_experts=4, output_router_logits=router, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


class Labels(Uneven):
    """As Hugging Face has it: the labels are the tokens themselves, and some of them do not count."""

    def __getitem__(self, index: int) -> Any:
        row = torch.randint(29, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": torch.where(torch.arange(16) < index % 16, -100, row)}


class Noting:
    """Features [4], the first of which is the index; it writes down in the file `log` what it is asked for."""

    def __init__(self, log: str) -> None:
        self._log = Path(log)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with self._log.open("a") as file:
            file.write(f"{index}\n")
        return torch.full((4,), index / 40), torch.zeros(1)
