"""What a hook returns: an event, and figures of its numbers."""

from typing import Any

import pytest
import torch

from dtrain.errors import WordsError
from dtrain.hook import numbers, plain


def test_numbers_are_figures_and_the_rest_is_not() -> None:
    said = plain({"f1": torch.tensor(0.5), "eval_auc": 1, "right": True, "text": "seen", "ghp_a0AZia6zaaU8PLlLmsQlD5Mb4XhpOYNhj0cm": 1.0}, "Mine")
    assert numbers(said) == {"eval_f1": 0.5, "eval_auc": 1.0}


@pytest.mark.parametrize("said", [[1], 3.0, {1: 2.0}])
def test_what_is_no_mapping_of_names_is_refused(said: Any) -> None:
    with pytest.raises(WordsError, match=r"^hook Mine returned a (list|float|dict), .* Let it return None, or a dict"):
        plain(said, "Mine")
