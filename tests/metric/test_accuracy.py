"""Accuracy: that of sklearn, also of several batches."""

import sklearn.metrics
import torch

from dtrain.metric.accuracy import Accuracy


def test_it_is_the_share_of_right_predictions() -> None:
    scores = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(50) % 7
    metric = Accuracy()
    whole = metric.part(scores[:13], targets[:13]) + metric.part(scores[13:], targets[13:])
    assert metric.value(whole.double()) == sklearn.metrics.accuracy_score(targets, scores.argmax(1))


def test_of_nothing_it_is_no_number() -> None:
    metric = Accuracy()
    whole = metric.part(torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64))
    assert metric.value(whole) != metric.value(whole)
