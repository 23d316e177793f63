"""Warm-up, then flat."""

import pytest
import torch

from dtrain.schedule import set_lr
from dtrain.schedule.constant import Constant


@pytest.mark.parametrize(("step", "factor"), [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (99, 1.0)])
def test_it_warms_up_and_stays(step: int, factor: float) -> None:
    assert Constant(steps=100, warmup=4).factor(step) == factor


def test_a_warm_up_below_one_is_a_part_of_the_run() -> None:
    assert [Constant(steps=40, warmup=0.1).factor(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_no_warm_up_begins_at_full_speed() -> None:
    assert Constant(steps=100, warmup=0).factor(0) == 1.0


def test_every_group_keeps_its_own_learning_rate() -> None:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": 0.4}])
    for factor in (0.5, 0.25, 0.25):
        assert set_lr(optimizer, factor) == {"lr": 0.1 * factor, "lr_1": 0.4 * factor}
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * factor, 0.4 * factor]


def test_groups_with_a_name_are_told_by_it_and_those_alike_once() -> None:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    named = [{"params": weights[:1], "name": "body"}, {"params": weights[1:2], "name": "head", "lr": 0.4}]
    assert set_lr(torch.optim.SGD(named, lr=0.1), 0.5) == {"lr": 0.05, "lr_body": 0.05, "lr_head": 0.2}
    assert set_lr(torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.1), 0.5) == {"lr": 0.05}
