"""Precision, recall and F1 of each class: those of sklearn's classification_report."""

import sklearn.metrics
import torch

from dtrain.metric.per_class import PerClass


def test_they_are_those_of_sklearn() -> None:
    scores = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    scores[:, 3] -= 100  # never predicted
    targets = torch.arange(40) % 4
    metric = PerClass()
    whole = (metric.part(scores[:7], targets[:7]) + metric.part(scores[7:], targets[7:])).double()
    report = sklearn.metrics.classification_report(targets, scores.argmax(1), output_dict=True, zero_division=0)
    for name, theirs in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
        expected = torch.tensor([report[str(each)][theirs] for each in range(4)], dtype=torch.float64)
        assert torch.allclose(metric.value(whole)[name], expected, rtol=0, atol=1e-12), name
    assert all(value.isnan().all() for value in metric.value(whole * 0).values())
