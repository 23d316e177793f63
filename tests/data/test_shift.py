"""Targets that are the inputs are seen, and moved to the next token where that is asked for; targets of other tasks are left in peace."""

import pytest
import torch

from dtrain.data.shift import copies, leads, next_targets
from dtrain.errors import WordsError

ROW = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])


def batch(targets: torch.Tensor, tokens: torch.Tensor = ROW) -> dict[str, object]:
    return {"inputs": {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, "targets": targets}


def test_labels_that_are_the_inputs_are_copies() -> None:
    assert copies(batch(ROW)) and not leads(batch(ROW))
    assert copies(batch(torch.where(torch.arange(10) < 3, -100, ROW))), "those that do not count say nothing"
    assert copies({"inputs": ROW, "targets": ROW})


def test_next_tokens_are_none() -> None:
    moved = torch.cat([ROW[:, 1:], torch.tensor([[1], [2]])], 1)
    assert leads(batch(moved)) and not copies(batch(moved))


def test_one_token_again_and_again_may_be_either() -> None:
    same = torch.full((2, 10), 4)
    assert not copies(batch(same, same)) and not leads(batch(same, same))


def test_what_a_masked_model_is_asked_for_is_no_copy() -> None:
    hidden = ROW.clone()
    hidden[:, ::2] = 0
    asked = torch.where(torch.arange(10) % 2 == 0, ROW, -100)
    assert not copies(batch(asked, hidden))
    assert not copies(batch(torch.where(torch.arange(10) == 3, ROW, -100))), "the few that were left as they are"


def test_classes_and_fractions_are_no_tokens() -> None:
    for targets in (torch.tensor([1, 2]), torch.randn(2, 10)):
        assert not copies({"inputs": ROW, "targets": targets}) and not leads({"inputs": ROW, "targets": targets})


def test_the_target_becomes_the_next_token_and_the_last_has_none() -> None:
    moved = next_targets(batch(torch.where(torch.arange(10) < 3, -100, ROW)))
    assert moved[0].tolist() == [-100, -100, 1, 5, 9, 2, 6, 5, 3, -100]


@pytest.mark.parametrize(
    "targets",
    [torch.tensor([1, 2]), torch.randn(2, 10), torch.cat([ROW[:, 1:], ROW[:, :1]], 1)],
    ids=["classes", "fractions", "moved"],
)
def test_what_cannot_be_moved_is_refused(targets: torch.Tensor) -> None:
    with pytest.raises(WordsError, match=r"^data\.shift=true: "):
        next_targets(batch(targets))
