"""Top 5: that of sklearn."""

import sklearn.metrics
import torch

from dtrain.metric.top5 import Top5


def test_a_target_counts_among_the_five_highest_scores() -> None:
    scores = torch.randn(60, 9, generator=torch.Generator().manual_seed(1))
    targets = torch.arange(60) % 9
    expected = sklearn.metrics.top_k_accuracy_score(targets, scores, k=5, labels=range(9))
    assert Top5().value(Top5().part(scores, targets).double()) == expected
