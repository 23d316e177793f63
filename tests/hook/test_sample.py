"""A sample of text from the model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtrain.config.period import is_due
from dtrain.hook import StepInfo
from dtrain.hook.sample import Sample


class Letters:
    """A source whose samples are five tokens long and whose text is bytes."""

    def take(self, index: Any, epoch: Any) -> dict[str, torch.Tensor]:
        return {"inputs": torch.zeros(len(index), 5, dtype=torch.long)}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()


def info(forward: Any, **changed: Any) -> StepInfo:
    given = {
        "step": 7,
        "steps": 10,
        "seen": 70,
        "seed": 0,
        "loss": torch.tensor(1.0),
        "norm": torch.tensor(1.0),
        "lr": 0.1,
        "source": Letters(),
        "model": None,
        "weights": None,
        "epoch": 0,
    }
    return StepInfo(**given | changed, forward=forward)  # type: ignore[arg-type]


def next_letter(tokens: torch.Tensor) -> torch.Tensor:
    return 100.0 * torch.nn.functional.one_hot(tokens + 1, 256).float()


@pytest.mark.parametrize("wrap", [lambda logits: logits, lambda logits: SimpleNamespace(logits=logits)])
def test_the_text_goes_on_from_the_prompt(wrap: Any) -> None:
    said = Sample(every=5, prompt="ab", tokens=4, temperature=0.5)(info(lambda tokens: wrap(next_letter(tokens))))
    assert said["text"] == "\n── sample after step 7 ──\nabcdef\n"


def test_the_model_is_shown_no_more_than_it_was_trained_on() -> None:
    lengths = []

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return next_letter(tokens)

    Sample(every=5, prompt="abc", tokens=6, temperature=0)(info(forward))
    assert lengths == [3, 4, 5, 5, 5, 5]


def test_every_step_of_a_run_draws_alike_from_the_seed() -> None:
    def forward(tokens: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*tokens.shape, 120)

    sample = Sample(every=5, prompt="a", tokens=30, temperature=1.0)
    assert sample(info(forward)) == sample(info(forward))
    assert sample(info(forward)) != sample(info(forward, seed=1))


def test_a_hook_is_due_every_so_many_steps_and_at_the_end() -> None:
    assert [step for step in range(1, 11) if is_due(4, step, last=step == 10)] == [4, 8, 10]
    assert [step for step in range(1, 11) if is_due(0, step, last=step == 10)] == [10]


def test_a_hook_cannot_change_what_it_looks_at() -> None:
    with pytest.raises(AttributeError):
        info(next_letter).step = 3  # type: ignore[misc]
