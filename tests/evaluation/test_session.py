"""A forward for hooks takes tokens of any length, and other inputs as they are."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtrain.evaluation.session import quiet, watch, whole_steps


def shape_passed_on(inputs: Tensor) -> list[int]:
    """The shape that the model is given, where ranks cut sequences in four."""
    return list(whole_steps(lambda x: torch.tensor([[*x.shape]]), 4)(inputs)[0])


def test_tokens_are_padded_to_a_whole_step_and_the_answer_is_cut() -> None:
    lengths = []
    forward = whole_steps(lambda tokens: (lengths.append(tokens.shape[1]), tokens * 2)[1], 4)
    tokens = torch.arange(1, 11).view(2, 5)
    assert torch.equal(forward(tokens), tokens * 2) and lengths == [8]


@pytest.mark.parametrize("shape", [(2, 63), (2, 1, 8, 8), (2, 5, 7), (3,)])
def test_features_and_images_stay_as_they_are(shape: tuple[int, ...]) -> None:
    assert shape_passed_on(torch.ones(shape)) == list(shape)


def test_a_watched_model_evaluates_during_its_forward_alone_and_a_quiet_one_as_it_is() -> None:
    model, inputs = nn.Dropout(0.5), torch.ones(64)
    mesh: Any = SimpleNamespace(device=torch.device("cpu"))
    precision: Any = SimpleNamespace(autocast=lambda _: nullcontext())
    assert torch.equal(watch(model, mesh, precision, step=1)(inputs), inputs) and model.training
    assert not torch.equal(quiet(model, mesh, precision, step=1)(inputs), inputs)
