"""Fully connected layers."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from dtrain.model.mlp import MLP


def test_it_is_linear_layers_with_gelu_between() -> None:
    model, x = MLP(inputs=6, outputs=3, width=5, layers=1), torch.randn(4, 6)
    (a,), b = model.layers, model.head
    expected = F.gelu(x @ a.weight.T + a.bias) @ b.weight.T + b.bias
    assert torch.allclose(model(x), expected, atol=1e-6)


def test_no_hidden_layer_is_a_linear_model() -> None:
    model, x, y = MLP(inputs=6, outputs=3, width=5, layers=0), torch.randn(4, 6), torch.randn(4, 6)
    assert torch.allclose(model(x + y), model(x) + model(y) - model(torch.zeros(4, 6)), atol=1e-5)


def test_inputs_of_several_dims_are_flattened() -> None:
    assert MLP(inputs=[2, 3, 4], outputs=3, width=5, layers=1)(torch.randn(7, 2, 3, 4)).shape == (7, 3)


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_the_number_of_weights_follows_the_formula(layers: int) -> None:
    sizes = [6, *[5] * layers, 3]
    expected = sum((a + 1) * b for a, b in pairwise(sizes))
    assert sum(p.numel() for p in MLP(inputs=6, outputs=3, width=5, layers=layers).parameters()) == expected


def test_every_parameter_is_filled_and_keeps_the_size_of_its_input() -> None:
    model = MLP(inputs=256, outputs=256, width=256, layers=3)
    for name, parameter in model.named_parameters():
        whole = torch.full(parameter.shape, float("nan"))
        model.init_weight(name, whole, torch.Generator().manual_seed(1))
        assert torch.isfinite(whole).all(), name
        with torch.no_grad():
            parameter.copy_(whole)
    out = model(torch.randn(200, 256, generator=torch.Generator().manual_seed(0)))
    assert 0.3 < out.std().item() < 3
