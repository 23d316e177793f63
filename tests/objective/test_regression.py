"""Mean squared error over all outputs."""

import pytest
import torch

from dtrain.errors import WordsError
from dtrain.objective.regression import Regression


def test_the_mean_is_over_all_outputs() -> None:
    predicted, targets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, 2.0], [3.0, 1.0]])
    batch = {"inputs": None, "targets": targets}
    assert Regression().loss(predicted, batch).sum.item() == 1 + 9
    assert Regression().count(batch) == 4


def test_one_output_fits_targets_without_a_dim() -> None:
    batch = {"inputs": None, "targets": torch.tensor([1.0, 2.0, 3.0])}
    assert Regression().loss(torch.tensor([[1.0], [2.0], [5.0]]), batch).sum.item() == 4, (
        "and is not spread over a square"
    )


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(WordsError, match=r"the model returns \[3, 2\], but the targets are \[3\]"):
        Regression().loss(torch.zeros(3, 2), {"inputs": None, "targets": torch.zeros(3)})
    with pytest.raises(WordsError, match=r"the model returns \[4, 2, 3\], but the targets are \[4, 3, 2\]"):
        Regression().loss(torch.zeros(4, 2, 3), {"inputs": None, "targets": torch.zeros(4, 3, 2)})
