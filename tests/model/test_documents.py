"""Who sees whom in a row of several documents."""

import pytest
import torch
from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.model import documents

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])


def test_a_token_sees_its_own_document_up_to_itself() -> None:
    mask = documents.mask(POSITIONS, torch.bfloat16)
    assert mask is not None and mask.shape == (2, 1, 6, 6) and mask.dtype == torch.bfloat16
    assert {*mask.unique().tolist()} == {0.0, -torch.inf}
    seen = (mask == 0)[0, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert torch.equal(mask[1, 0] == 0, torch.ones(6, 6).tril().bool())
    assert documents.mask(None, torch.float32) is None


def test_where_a_sequence_is_split_something_else_stands_for_the_mask() -> None:
    with documents.replaced(lambda positions: positions + 1):
        assert torch.equal(documents.mask(POSITIONS, torch.float32), POSITIONS + 1)  # type: ignore[arg-type]
    assert documents.mask(POSITIONS, torch.float32).shape[1] == 1  # type: ignore[union-attr]


class Takes(nn.Module):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return input_ids


class TakesAll(nn.Module):
    def forward(self, input_ids: Tensor, **others: Tensor) -> Tensor:
        return input_ids


def test_a_model_that_takes_no_positions_is_refused() -> None:
    documents.check(Takes())
    documents.check(TakesAll())
    with pytest.raises(WordsError, match=r"the forward of Linear takes no position_ids.*data.packing=none"):
        documents.check(nn.Linear(2, 2))


def test_no_keys_are_kept_for_packed_rows_unless_asked() -> None:
    given = {"position_ids": POSITIONS}
    assert documents.without_cache(nn.Identity(), (), given) == ((), {**given, "use_cache": False})
    assert documents.without_cache(nn.Identity(), (), {}) is None
    assert documents.without_cache(nn.Identity(), (), {**given, "past_key_values": 1}) is None
