"""Cross entropy over classes, with accuracy."""

import pytest
import torch

from dtrain.objective.classification import Classification


def test_loss_and_accuracy_are_sums() -> None:
    logits = torch.tensor([[5.0, 0, 0], [0, 5, 0], [0, 0, 5], [5, 0, 0]])
    batch = {"inputs": logits, "targets": torch.tensor([0, 1, 1, 2])}
    loss = Classification().loss(logits, batch)
    right, wrong = -logits[0].log_softmax(0)[0], -logits[0].log_softmax(0)[1]
    assert torch.allclose(loss.sum, 2 * right + 2 * wrong)
    assert loss.metrics["accuracy"].item() == 2
    assert Classification().count(batch) == 4


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
def test_any_whole_number_is_a_class(kind: torch.dtype) -> None:
    batch = {"inputs": None, "targets": torch.tensor([1, 0], dtype=kind)}
    assert Classification().loss(torch.eye(2), batch).metrics["accuracy"].item() == 0
