"""Perplexity: that of torchmetrics."""

import pytest
import torch
from torchmetrics.text import Perplexity as Theirs

from dtrain.metric.perplexity import Perplexity


def test_it_is_that_of_torchmetrics() -> None:
    scores = torch.randn(3, 20, 11, generator=torch.Generator().manual_seed(0))
    targets, metric = torch.arange(60).view(3, 20) % 11, Perplexity()
    parts = [metric.part(scores[number], targets[number]) for number in range(3)]
    whole = torch.stack(parts).sum(0)
    assert metric.value(whole) == pytest.approx(float(Theirs()(scores, targets)), rel=1e-6)


def test_it_stays_finite() -> None:
    assert Perplexity().value(torch.tensor([1e9, 1.0], dtype=torch.float64)) > 1e300
