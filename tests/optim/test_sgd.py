"""SGD: momentum, Nesterov, decay as part of the gradient, the same on shards."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from golden import MESHES, SCALES, Case, by_decay
from golden import agree as hold
from pool import resident
from small import PARTS, STRATEGIES, agree, few_steps
from torch import Tensor

from dtrain.optim.sgd import build


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_update_by_hand(nesterov: bool) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = build(model=model, lr=0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.3)
    weight, bias, w_momentum, b_momentum = model.weight.detach().clone(), model.bias.detach().clone(), 0.0, 0.0
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        model.weight.grad, model.bias.grad = torch.randn(2, 3, generator=generator), torch.randn(2, generator=generator)
        w_gradient, b_gradient = model.weight.grad + 0.3 * weight, model.bias.grad.clone()
        optimizer.step()
        w_momentum, b_momentum = 0.9 * w_momentum + w_gradient, 0.9 * b_momentum + b_gradient
        weight = weight - 0.1 * (w_gradient + 0.9 * w_momentum if nesterov else w_momentum)
        bias = bias - 0.1 * (b_gradient + 0.9 * b_momentum if nesterov else b_momentum)
    assert torch.allclose(model.weight, weight, atol=1e-6)
    assert torch.allclose(model.bias, bias, atol=1e-6)


def test_no_momentum_needs_no_second_word() -> None:
    model = torch.nn.Linear(1, 1)
    model.weight.grad, model.bias.grad = torch.ones(1, 1), torch.ones(1)
    before = model.weight.item()
    build(model=model, lr=0.1, momentum=0.0, nesterov=True, weight_decay=0.0).step()
    assert model.weight.item() == pytest.approx(before - 0.1)


def test_a_weight_without_a_gradient_takes_no_memory_for_a_momentum() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer: Any = build(model=model, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0)
    model.weight.grad = torch.ones(2, 3)
    optimizer.step()
    assert list(optimizer.state) == [model.weight]
    model.bias.grad = torch.ones(2)
    optimizer.step()
    assert list(optimizer.state) == [model.weight, model.bias]


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard")])
def test_it_learns_the_same_on_two_ranks(strategy: str, axis: str) -> None:
    (reference,) = resident(1, few_steps, PARTS, {})
    for rank in resident(2, few_steps, PARTS | {"strategy": STRATEGIES[strategy]}, {axis: 2}):
        agree(rank, reference)


def test_weights_of_eight_bits_move_too() -> None:
    """More of them than one vector instruction takes."""
    model = torch.nn.Linear(8, 8).bfloat16()
    before = model.weight.detach().float().clone()
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    build(model=model, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0).step()
    assert (before - model.weight.detach().float()).min() > 0.05


def cases(scales: Sequence[float]) -> Iterator[Case]:
    """A learning rate with which weights move by a tenth of their size, and decay to match: SGD knows no scale of its own."""
    for scale in scales:
        for momentum, nesterov, decay in (
            (0.9, True, 1e-3),
            (0.9, False, 0.1),
            (0, True, 0.1),
            (0.0, False, 0),
            (0.5, True, 0),
        ):
            yield scale, {"lr": 0.1 / scale, "momentum": momentum, "nesterov": nesterov, "weight_decay": decay * scale}


def torchs(
    weights: dict[str, Tensor], *, nesterov: bool, momentum: float, weight_decay: float, **options: Any
) -> torch.optim.Optimizer:
    options |= {"momentum": momentum, "nesterov": nesterov and momentum > 0, "foreach": False, "fused": False}
    return torch.optim.SGD(by_decay(weights, weight_decay), **options)


def test_the_update_is_torchs_at_every_size_of_gradients_and_for_every_shape() -> None:
    """Also of weights whose first gradient comes in a later step, which torch's fused kernel refuses."""
    hold(build, torchs, cases(SCALES))


@pytest.mark.often("{'dp_shard': 3}", "{'tp': 2}")
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_the_update_is_torchs_on_every_mesh(degrees: dict[str, int]) -> None:
    hold(build, torchs, cases((1.0,)), **degrees)
