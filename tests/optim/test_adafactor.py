"""Adafactor: little memory, the same on shards."""

from typing import Any

import pytest
import torch
from golden import MESHES, SCALES, by_decay
from golden import agree as hold
from pool import resident
from small import PARTS, STRATEGIES, agree, few_steps, small_gpt
from torch import Tensor

from dtrain.errors import WordsError
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


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard"), ("ddp", "tp")])
def test_it_learns_the_same_on_two_ranks(strategy: str, axis: str) -> None:
    (reference,) = resident(1, few_steps, PARTS | {"optim": ADAFACTOR}, {})
    for rank in resident(2, few_steps, PARTS | {"optim": ADAFACTOR, "strategy": STRATEGIES[strategy]}, {axis: 2}):
        agree(rank, reference)


CASES = [
    {"lr": 0.3, "beta2_decay": -0.8, "d": 1.0, "weight_decay": 0.1},
    {"lr": 0.05, "beta2_decay": 0, "d": 2.5, "weight_decay": 0},
]


def torchs(weights: dict[str, Tensor], *, weight_decay: float, **options: Any) -> torch.optim.Optimizer:
    """As for weights in fp32, whose eps it takes."""
    return torch.optim.Adafactor(
        by_decay(weights, weight_decay), eps=(torch.finfo(torch.float32).eps, 1e-3), foreach=False, **options
    )


def test_the_update_is_torchs_at_every_size_of_gradients_and_for_every_shape() -> None:
    hold(build, torchs, ((scale, case) for scale in SCALES for case in CASES))


@pytest.mark.often("{'dp_shard': 3}", "{'tp': 2}")
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_the_update_is_torchs_on_every_mesh(degrees: dict[str, int]) -> None:
    hold(build, torchs, ((scale, CASES[0]) for scale in (1e-8, 1e-5, 1e-2, 1e2)), **degrees)


def test_weights_in_bfloat16_move_as_torchs_do() -> None:
    """Which rounds every sum to three digits; here they are in fp32."""
    weights = [torch.randn(24, 16, generator=torch.Generator().manual_seed(3)).bfloat16() for _ in range(2)]
    gradient = torch.randn(24, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    model = torch.nn.ParameterList([torch.nn.Parameter(weights[0])])
    torchs_own = torch.optim.Adafactor([weights[1].requires_grad_()], lr=0.3)
    made = build(model=model, lr=0.3, beta2_decay=-0.8, d=1.0, weight_decay=0.0)
    model[0].grad = weights[1].grad = gradient
    made.step()
    torchs_own.step()
    assert model[0].dtype == torch.bfloat16
    torch.testing.assert_close(model[0].detach(), weights[1].detach(), rtol=0.02, atol=0.02)


def test_complex_weights_are_refused_by_name() -> None:
    model = torch.nn.ParameterDict({"filter": torch.zeros(4, 5, dtype=torch.complex64)})
    with pytest.raises(WordsError, match=r"optim=adafactor: filter holds complex numbers.* Type optim=adamw"):
        build(model=model, lr=0.1, beta2_decay=-0.8, d=1.0, weight_decay=0.0)
