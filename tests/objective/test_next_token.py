"""Cross entropy of the next token."""

import math
from types import SimpleNamespace

import torch

from dtrain.objective.next_token import NextToken


def test_guessing_costs_the_logarithm_of_the_vocabulary_per_token() -> None:
    batch = {"inputs": torch.zeros(2, 3, dtype=torch.long), "targets": torch.ones(2, 3, dtype=torch.long)}
    objective = NextToken()
    loss = objective.loss(torch.zeros(2, 3, 7), batch)
    assert objective.count(batch) == 6
    assert math.isclose(loss.sum.item(), 6 * math.log(7), rel_tol=1e-6)


def test_targets_that_are_ignored_cost_nothing_and_do_not_count() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 2], [-100, -100, 3]])
    batch = {"inputs": logits, "targets": targets}
    expected = -sum(logits[i, j].log_softmax(-1)[targets[i, j]] for i, j in ((0, 0), (0, 2), (1, 2)))
    assert NextToken().count(batch) == 3
    assert torch.allclose(NextToken().loss(logits, batch).sum, expected)


def test_sums_add_up_over_any_split_of_the_batch() -> None:
    logits = torch.randn(6, 3, 7)
    batch = {"inputs": logits, "targets": torch.randint(7, (6, 3))}
    whole = NextToken().loss(logits, batch).sum
    parts = [
        NextToken().loss(logits[a:b], {"inputs": logits[a:b], "targets": batch["targets"][a:b]}).sum
        for a, b in ((0, 1), (1, 6))
    ]
    assert torch.allclose(sum(parts), whole)


def test_a_model_may_return_its_logits_in_an_object() -> None:
    logits, batch = torch.randn(1, 2, 5), {"inputs": None, "targets": torch.tensor([[1, 2]])}
    assert torch.equal(NextToken().loss(SimpleNamespace(logits=logits), batch).sum, NextToken().loss(logits, batch).sum)


def test_half_precision_logits_are_summed_in_full() -> None:
    batch = {"inputs": None, "targets": torch.zeros(64, 64, dtype=torch.long)}
    assert NextToken().loss(torch.zeros(64, 64, 300, dtype=torch.float16), batch).sum.item() > 20_000
