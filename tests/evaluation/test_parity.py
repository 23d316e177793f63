"""How two runs are compared, tensor by tensor: what is rounding alone is told from what is small."""

import pytest
import torch
from torch import Tensor

from dtrain.evaluation.parity import ROUNDING, First, Row, _apart, _first_rows, _relative, _rounded, first_difference

ALLOWED = {"gradients": 1e-5, "updates": 1e-3}


def noted(**gradients: Tensor) -> First:
    updates = {name: -0.01 * gradient.sign() for name, gradient in gradients.items()}
    return First(1, [], gradients, updates, {name: torch.ones_like(gradient) for name, gradient in gradients.items()})


def large(seed: int = 0) -> Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(here: First, there: First, parts: First) -> list[Row]:
    return list(
        _first_rows(here, there, parts, _rounded(parts.gradients, there.gradients, ROUNDING["float32"]), ALLOWED)
    )


def test_a_gradient_that_is_rounding_alone_is_no_difference_and_counted() -> None:
    here, there, parts = (noted(weight=large(), bias=1e-7 * large(seed)) for seed in (1, 2, 3))
    gradients, updates = rows(here, there, parts)
    assert (gradients.first, gradients.compared, gradients.rounded) == (None, 2, 1)
    assert (updates.first, updates.compared, updates.rounded) == (None, 2, 1), (
        "though each number moves by a full step, here and there"
    )


def test_a_small_gradient_is_compared_like_any_other() -> None:
    here, there, parts = (noted(weight=large(), scaled=1e-6 * large(1)) for _ in range(3))
    assert [(row.compared, row.rounded) for row in rows(here, there, parts)] == [(2, 0), (2, 0)]


def test_a_wrong_gradient_is_named_however_small_it_is() -> None:
    here, there, parts = (noted(weight=large(), scaled=size * large(1)) for size in (1.1e-6, 1e-6, 1e-6))
    assert first_difference(rows(here, there, parts)) == "gradient of scaled at step 1"


def test_a_small_loss_is_compared_to_itself() -> None:
    assert _relative(1.01e-4, 1e-4) == pytest.approx(0.01)
    assert _relative(None, None) == 0 and _relative(None, 1.0) == _relative(1.0, None) == float("inf")


def test_what_depends_on_the_parts_is_no_rounding() -> None:
    here, there, parts = (noted(weight=size * large()) for size in (1.01, 1.0, 1.02))
    assert first_difference(rows(here, there, parts)) == "gradient of weight at step 1"


def test_what_differs_by_more_than_rounding_does_is_not_counted_as_rounding() -> None:
    here, there, parts = (
        noted(weight=large(), bias=large(1)),
        noted(weight=large(), bias=1e-7 * large(2)),
        noted(weight=large(), bias=1e-7 * large(3)),
    )
    gradients, _ = rows(here, there, parts)
    assert (gradients.where, gradients.first, gradients.rounded) == ("bias", "bias", 0)


def test_an_update_of_another_size_is_named_though_its_gradient_agrees() -> None:
    here, there, parts = (noted(weight=large()) for _ in range(3))
    here.updates["weight"] *= 1.1
    assert first_difference(rows(here, there, parts)) == "update of weight at step 1"


def test_what_is_missing_is_as_far_away_as_can_be() -> None:
    assert _apart(None, torch.ones(2), 1.0) == float("inf") == _apart(torch.ones(3), torch.ones(2), 1.0)
    here, there, parts = noted(), noted(weight=large()), noted(weight=large())
    assert first_difference(rows(here, there, parts)) == "gradient of weight at step 1"


def test_the_first_difference_is_the_first_in_time() -> None:
    loss = Row("loss", 1.0, "step 5", 1e-6, "step 3", 3)
    norm = Row("norm", 1.0, "step 2", 1e-6, "step 2", 2)
    weights = Row("weights", 1.0, "out.weight", 1e-6, "in.weight")
    assert first_difference([loss, norm, weights]) == "norm at step 2"
    assert first_difference([weights]) == "weight of out.weight"
