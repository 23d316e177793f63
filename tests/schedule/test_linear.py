"""Warm-up, then a straight line down to the floor."""

import pytest
import torch
from transformers import get_linear_schedule_with_warmup

from dtrain.schedule.linear import Linear


def theirs(steps: int, warmup: int) -> list[float]:
    """The factor that each step of the optimizer uses in a loop of transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, steps)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (20, 0), (20, 5), (20, 19)])
def test_it_is_that_of_transformers_but_for_the_warm_up_of_one_step_more(steps: int, warmup: int) -> None:
    ours, used = Linear(steps=steps, warmup=warmup, floor=0.0), theirs(steps, warmup)
    assert [ours.factor(step) for step in range(warmup, steps)] == pytest.approx(used[warmup:])
    assert [ours.factor(step) for step in range(warmup)] == pytest.approx([lr + 1 / warmup for lr in used[:warmup]])


@pytest.mark.parametrize(
    ("step", "factor"), [(0, 0.1), (9, 1.0), (10, 1.0), (55, 0.6), (99, 0.2 + 0.8 / 90), (120, 0.2)]
)
def test_the_curve_at_its_marks(step: int, factor: float) -> None:
    assert Linear(steps=100, warmup=10, floor=0.2).factor(step) == pytest.approx(factor)


def test_a_warm_up_below_one_is_a_part_of_the_run() -> None:
    part, whole = Linear(steps=200, warmup=0.1, floor=0.0), Linear(steps=200, warmup=20, floor=0.0)
    assert [part.factor(step) for step in range(200)] == [whole.factor(step) for step in range(200)]


@pytest.mark.parametrize("warmup", [10, 10.5, 30, 1000])
def test_a_warm_up_longer_than_the_run_ends_with_it(warmup: float) -> None:
    assert [Linear(steps=10, warmup=warmup, floor=0.0).factor(step) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
