"""F1: that of sklearn, for two classes and for more, of which some do not occur."""

import pytest
import sklearn.metrics
import torch

from dtrain.errors import WordsError
from dtrain.metric.f1 import F1


def f1(scores: torch.Tensor, targets: torch.Tensor) -> float:
    metric = F1()
    return metric.value((metric.part(scores[:5], targets[:5]) + metric.part(scores[5:], targets[5:])).double())


@pytest.mark.parametrize(("classes", "seen", "average"), [(2, 2, "binary"), (4, 4, "macro"), (9, 4, "macro")])
def test_it_is_that_of_sklearn(classes: int, seen: int, average: str) -> None:
    scores = torch.randn(40, classes, generator=torch.Generator().manual_seed(classes))
    scores[:, seen:] -= 100  # never predicted, and never true
    targets = torch.arange(40) % seen
    expected = sklearn.metrics.f1_score(targets, scores.argmax(1), average=average)
    assert f1(scores, targets) == pytest.approx(expected, abs=1e-12)


def test_what_is_never_right_is_zero_and_what_is_not_there_no_number() -> None:
    scores = torch.tensor([[1.0, 0.0]]).repeat(8, 1)
    assert f1(scores, torch.ones(8, dtype=torch.int64)) == 0
    assert f1(scores, torch.zeros(8, dtype=torch.int64)) == 0, "class 1 does not occur: sklearn says 0 too"
    nothing = f1(scores[:0], torch.zeros(0, dtype=torch.int64))
    assert nothing != nothing


def test_a_target_that_is_no_class_is_refused() -> None:
    with pytest.raises(WordsError, match="a target is 7, but the model has 3 classes"):
        f1(torch.zeros(8, 3), torch.full((8,), 7))
