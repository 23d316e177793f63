"""A loss that nothing can be trained by, and inputs of a type that the model does not take, are refused in a sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from launching import plan_of
from pool import RankFailed, ranks
from torch import nn

from dtrain.errors import WordsError
from dtrain.loop.step import call
from dtrain.train import train


@pytest.mark.parametrize("ranked", ["devices=1 strategy=single", "devices=2 strategy=ddp", "devices=2 strategy=fsdp"])
def test_outputs_without_a_gradient_are_refused_in_a_sentence(ranked: str, tmp_path: Path) -> None:
    words = "model._target_=wrong_models.Detached trust=[wrong_models] data=synthetic objective=regression steps=2"
    plan = plan_of(tmp_path / "run", *words.split(), *ranked.split())
    with pytest.raises(RankFailed, match=r"WordsError.*the loss does not depend on any trained parameter"):
        ranks(plan.world, train, plan)


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 2), nn.Conv1d(1, 2, 3), nn.LayerNorm(4)], ids=lambda model: type(model).__name__
)
def test_whole_numbers_where_fractions_are_needed_are_told(model: nn.Module) -> None:
    with pytest.raises(WordsError, match=r"Write x\.float\(\) in the forward"):
        call(model, torch.ones(2, 1, 4, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="shape") as other:
        call(nn.Linear(3, 2), torch.ones(2, 4))
    assert not isinstance(other.value, WordsError)


class ByName(nn.Module):
    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return x


class Inside(nn.Module):
    """Calls another module wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ByName()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.inner(x)
        return inner


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (
            torch.ones(2),
            r"takes 1 positional argument but 2 were given. The data gives it one input. .* data.inputs=\[x\]",
        ),
        ({"y": torch.ones(2)}, r"unexpected keyword argument 'y'. The data gives it y by name"),
    ],
)
def test_arguments_that_a_forward_does_not_take_are_told(inputs: Any, sentence: str) -> None:
    assert call(ByName(), {"x": torch.ones(2)}).sum() == 2
    with pytest.raises(WordsError, match=rf"^model: ByName.forward\(\) .*{sentence}"):
        call(ByName(), inputs)
    with pytest.raises(TypeError, match="ByName"):
        call(Inside(), torch.ones(2))
