"""AUROC: that of sklearn, with ties, and for several classes of which one does not occur."""

import pytest
import sklearn.metrics
import torch

from dtrain.metric.auroc import AUROC, area


def test_ties_count_half() -> None:
    scores = (torch.rand(200, generator=torch.Generator().manual_seed(0)) * 10).round()
    positive = torch.arange(200) % 3 == 0
    assert area(scores, positive) == pytest.approx(sklearn.metrics.roc_auc_score(positive, scores), abs=1e-12)


def test_of_two_classes_it_is_that_of_class_1() -> None:
    scores = torch.randn(80, 2, generator=torch.Generator().manual_seed(2))
    targets, metric = torch.arange(80) % 2, AUROC()
    rows = torch.cat([metric.part(scores[:33], targets[:33]), metric.part(scores[33:], targets[33:])])
    expected = sklearn.metrics.roc_auc_score(targets, scores.double().softmax(1)[:, 1])
    assert metric.value(rows) == pytest.approx(expected, abs=1e-12)


def test_classes_that_do_not_occur_are_left_out() -> None:
    scores = torch.randn(80, 4, generator=torch.Generator().manual_seed(3))
    targets, metric = torch.arange(80) % 3, AUROC()
    probabilities = scores.double().softmax(1)
    each = [sklearn.metrics.roc_auc_score(targets == label, probabilities[:, label]) for label in range(3)]
    assert metric.value(metric.part(scores, targets)) == pytest.approx(sum(each) / 3, abs=1e-12)


def test_of_one_class_there_is_none() -> None:
    metric = AUROC()
    value = metric.value(metric.part(torch.randn(5, 3), torch.ones(5, dtype=torch.int64)))
    assert value != value
