"""Cross entropy over classes, with accuracy."""

import math

import pytest
import torch

from dtrain.errors import WordsError
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


def test_targets_that_do_not_count_are_in_no_mean() -> None:
    logits = torch.tensor([[5.0, 0], [5.0, 0], [0, 5.0]])
    batch = {"inputs": logits, "targets": torch.tensor([0, -100, 1])}
    counted = {"inputs": logits[[0, 2]], "targets": torch.tensor([0, 1])}
    both = [Classification().loss(part["inputs"], part) for part in (batch, counted)]
    assert Classification().count(batch) == Classification().count(counted) == 2
    assert torch.equal(both[0].sum, both[1].sum)
    assert both[0].metrics["accuracy"].item() == 2


def test_every_pixel_may_have_a_class() -> None:
    logits = torch.zeros(2, 3, 4, 4)
    logits[:, 1] = 9
    batch = {"inputs": None, "targets": torch.ones(2, 4, 4, dtype=torch.int64)}
    assert Classification().loss(logits, batch).metrics["accuracy"].item() == Classification().count(batch) == 32


@pytest.mark.parametrize("shape", [(3, 1), (2,), (3, 5)])
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(WordsError, match=r"the model returns \[3, 5\] and the targets are"):
        Classification().loss(torch.zeros(3, 5), {"inputs": None, "targets": torch.zeros(shape, dtype=torch.int64)})


def test_outputs_without_logits_are_refused() -> None:
    batch = {"inputs": None, "targets": torch.tensor([1, 0])}
    assert Classification().loss({"logits": torch.eye(2)}, batch).metrics["accuracy"].item() == 0
    with pytest.raises(WordsError, match="returns a tuple"):
        Classification().loss((torch.eye(2), None), batch)


def test_labels_in_another_form_are_told() -> None:
    for targets, sentence in (
        (torch.tensor([[0, 0, 1], [1, 0, 0]]), "They look one-hot: write the number of the class"),
        (torch.tensor([[0.0, 0, 1], [1, 0, 0]]), "They look one-hot"),
        (torch.tensor([0.0, 2.0]), "The ones in this batch are whole numbers: if all are, write 1 instead of 1.0"),
        (torch.tensor([0.0, 1.5, 1.0]), "One of them is 1.5: correct it"),
        (torch.tensor([0.0, float("nan")]), "One of them is nan: correct it"),
    ):
        with pytest.raises(WordsError) as error:
            Classification().loss(torch.randn(2, 3), {"inputs": None, "targets": targets})
        assert sentence in str(error.value)
    with pytest.raises(WordsError, match="it returns complex numbers"):
        Classification().loss(
            torch.randn(2, 3, dtype=torch.complex64), {"inputs": None, "targets": torch.tensor([0, 1])}
        )


def test_weights_of_classes_weigh_the_loss_and_not_the_accuracy() -> None:
    logits, targets = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, -100, 1, 2])
    objective, weights = Classification(weights=[0.3, 0.9, 1.7]), torch.tensor([0.3, 0.9, 1.7])
    batch = {"inputs": None, "targets": targets}
    loss, count = objective.loss(logits, batch), objective.count(batch)
    expected = torch.nn.functional.cross_entropy(logits, targets, weight=weights)
    torch.testing.assert_close(loss.sum / count, expected, rtol=1e-6, atol=0)
    hits = (logits.argmax(1) == targets).sum().item()
    assert objective.figures and objective.figures({"loss": 0.0, "accuracy": loss.metrics["accuracy"]}, count) == {
        "accuracy": hits / 4
    }


def test_weights_may_be_whole_numbers() -> None:
    batch = {"inputs": None, "targets": torch.tensor([0, 1])}
    assert Classification(weights=[1, 5]).loss(torch.zeros(2, 2), batch).sum.item() == pytest.approx(6 * math.log(2))


def test_weights_that_are_too_few_or_too_many_are_refused() -> None:
    batch = {"inputs": None, "targets": torch.tensor([0, 2])}
    with pytest.raises(
        WordsError, match=r"objective\.weights has 2 weights, for the classes 0 to 1, and a target is 2"
    ):
        Classification(weights=[1.0, 2.0]).count(batch)
    with pytest.raises(WordsError, match=r"objective\.weights has 4 weights, and the model has 3 classes"):
        Classification(weights=[1.0] * 4).loss(torch.zeros(2, 3), batch)
