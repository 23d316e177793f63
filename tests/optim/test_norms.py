"""Norms do not depend on how many numbers a tensor has."""

import pytest
import torch

from dtrain.optim.adafactor import build
from dtrain.optim.clip import clip
from dtrain.optim.norms import norm


def test_a_large_tensor_has_the_norm_of_its_parts() -> None:
    """Of 4e6 numbers torch's own sum in fp32 is 9e-5 low."""
    parameter = torch.nn.Parameter(torch.zeros(2**11, 2**11))
    parameter.grad = torch.randn(2**11, 2**11, generator=torch.Generator().manual_seed(0)).T
    exact = float(parameter.grad.double().norm())
    assert float(clip([parameter], None)) == pytest.approx(exact, rel=1e-6)
    assert float(norm(parameter.grad, torch.float32)) == pytest.approx(exact, rel=1e-6)


def test_the_update_of_adafactor_is_that_of_its_root_mean_square() -> None:
    layer = torch.nn.Linear(2**11, 2**11, bias=False)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    layer.weight.grad = torch.ones_like(layer.weight)
    before = layer.weight.detach().double()
    build(model=layer, lr=0.1, beta2_decay=-0.8, d=1e9, weight_decay=0.0).step()
    moved = (before - layer.weight.detach().double()).mean()
    assert float(moved) == pytest.approx(0.1 * float(before.square().mean().sqrt()), rel=1e-5)
