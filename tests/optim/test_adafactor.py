"""Adafactor: little memory, the same on shards."""

import pytest
import torch
from pool import ranks
from small import PARTS, STRATEGIES, agree, few_steps, small_gpt

from dtrain.optim.adafactor import build

ADAFACTOR = {"_target_": "dtrain.optim.adafactor.build", "lr": 0.01, "beta2_decay": -0.8, "d": 1.0, "weight_decay": 0.0}


def test_a_matrix_keeps_one_row_and_one_column() -> None:
    model = small_gpt()
    optimizer = build(model=model, lr=0.01, beta2_decay=-0.8, d=1.0, weight_decay=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all((parameter < before[name]).all() for name, parameter in model.named_parameters())
    kept = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
    matrices = sum(p.shape[0] + p.shape[1] for p in model.parameters() if p.ndim == 2)
    assert kept == vectors + matrices + len(list(model.parameters())), "one step counter each"


def test_an_update_is_as_large_as_the_learning_rate_says() -> None:
    """The root mean square of the first update is lr times that of the weight (arXiv 1804.04235, section 8)."""
    weight = torch.nn.Linear(16, 16, bias=False)
    before = weight.weight.detach().clone()
    weight.weight.grad = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    build(model=weight, lr=0.01, beta2_decay=-0.8, d=1.0, weight_decay=0.0).step()
    moved = (weight.weight - before).square().mean().sqrt().item()
    assert moved == pytest.approx(0.01 * before.square().mean().sqrt().item(), rel=0.1)


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard")])
def test_it_learns_the_same_on_two_ranks(strategy: str, axis: str) -> None:
    (reference,) = ranks(1, few_steps, PARTS | {"optim": ADAFACTOR}, {})
    for rank in ranks(2, few_steps, PARTS | {"optim": ADAFACTOR, "strategy": STRATEGIES[strategy]}, {axis: 2}):
        agree(rank, reference)
