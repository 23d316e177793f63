"""SGD: momentum, Nesterov, decay as part of the gradient, the same on shards."""

import pytest
import torch
from pool import ranks
from small import PARTS, STRATEGIES, agree, few_steps

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


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard")])
def test_it_learns_the_same_on_two_ranks(strategy: str, axis: str) -> None:
    (reference,) = ranks(1, few_steps, PARTS, {})
    for rank in ranks(2, few_steps, PARTS | {"strategy": STRATEGIES[strategy]}, {axis: 2}):
        agree(rank, reference)


def test_weights_of_eight_bits_move_too() -> None:
    """More of them than one vector instruction takes."""
    model = torch.nn.Linear(8, 8).bfloat16()
    before = model.weight.detach().float().clone()
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    build(model=model, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.0).step()
    assert (before - model.weight.detach().float()).min() > 0.05
