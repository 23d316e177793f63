"""AdamW: decay where it belongs, the published update, the same on shards."""

import warnings
from typing import Any

import pytest
import torch
from golden import MESHES, SCALES, by_decay
from golden import agree as hold
from pool import resident
from small import PARTS, STRATEGIES, agree, few_steps, small_gpt
from torch import Tensor

from dtrain.optim import groups
from dtrain.optim.adamw import build


def test_matrices_decay_and_vectors_do_not() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4), "b": torch.nn.LayerNorm(4), "c": torch.nn.Embedding(5, 4)})
    optimizer = build(model=model, lr=0.1, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.3)
    decays = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert {name: decays[id(parameter)] for name, parameter in model.named_parameters()} == {
        "a.weight": 0.3, "a.bias": 0.0, "b.weight": 0.0, "b.bias": 0.0, "c.weight": 0.3,
    }  # fmt: skip


class RMSNorm2d(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2, 3))


class NormalizedLinear(torch.nn.Module):
    """A matrix and a child: no norm, whatever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.norm = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.LayerNorm(3)


class Conditioned(torch.nn.LayerNorm):
    """A norm by its base, with a matrix of its own and a child."""

    def __init__(self) -> None:
        super().__init__([2, 3])
        self.shift, self.matrix = torch.nn.Linear(3, 4), torch.nn.Parameter(torch.ones(4, 3))


class ActiveNorm(RMSNorm2d):
    """A norm whose child has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.nn.GELU()


class ScaledLinear(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1, 3))


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.row = torch.nn.Parameter(torch.ones(1, 1)), torch.nn.Parameter(torch.ones(1, 1, 4))
        self.matrix, self.expert_bias = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(2, 3))


class Small(torch.nn.Module):
    """Features [B, 24] -> [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(24, 12), torch.nn.LayerNorm([2, 6]), torch.nn.Linear(12, 10)
        self.gate = torch.nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate * self.norm(self.up(x).view(-1, 2, 6)).flatten(1))
        return out


def test_decay_is_by_what_a_module_is_and_not_by_the_dims_of_a_parameter() -> None:
    linear = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4))
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        by_hook = torch.nn.utils.weight_norm(torch.nn.Linear(3, 4))
    model = torch.nn.ModuleDict({
        "norm of two dims": torch.nn.LayerNorm([2, 3]), "own norm": RMSNorm2d(), "no norm": NormalizedLinear(), "own": Gated(),
        "one output": torch.nn.Linear(3, 1), "lstm": torch.nn.LSTM(1, 2), "attention": torch.nn.MultiheadAttention(4, 2, add_bias_kv=True),
        "depthwise": torch.nn.Conv2d(4, 4, 3, groups=4), "pointwise": torch.nn.Conv2d(1, 4, 1), "weight norm": linear,
        "by base": Conditioned(), "active": ActiveNorm(), "scaled": ScaledLinear(),
        "hook": by_hook,
    })  # fmt: skip
    optimizer = build(model=model, lr=0.1, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed = {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {
        "no norm.matrix", "own.matrix", "one output.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0",
        "attention.in_proj_weight", "attention.out_proj.weight", "depthwise.weight", "pointwise.weight",
        "weight norm.parametrizations.weight.original1", "by base.shift.weight", "by base.matrix", "scaled.weight",
        "hook.weight_v",
    }  # fmt: skip


def test_frozen_weights_are_left_out() -> None:
    model = torch.nn.Linear(3, 4)
    model.bias.requires_grad_(False)
    assert [[p.shape for p in group["params"]] for group in groups(model, weight_decay=0.1)] == [[model.weight.shape]]


def test_the_update_is_the_published_one() -> None:
    """arXiv 1711.05101, algorithm 2, by hand."""
    model, lr, betas, eps, decay = torch.nn.Linear(3, 2, bias=False), 0.1, (0.9, 0.95), 1e-8, 0.3
    optimizer = build(model=model, lr=lr, betas=betas, eps=eps, weight_decay=decay)
    weight, m, v = model.weight.detach().clone().double(), 0.0, 0.0
    for step in range(1, 6):
        gradient = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        model.weight.grad = gradient.clone()
        optimizer.step()
        m, v = betas[0] * m + (1 - betas[0]) * gradient.double(), betas[1] * v + (1 - betas[1]) * gradient.double() ** 2
        weight -= lr * decay * weight
        weight -= lr * (m / (1 - betas[0] ** step)) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    assert torch.allclose(model.weight.double(), weight, atol=1e-6)


def test_one_kernel_updates_all_plain_weights() -> None:
    optimizer = build(model=small_gpt(), lr=0.1, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.3)
    assert all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard")])
def test_it_learns_the_same_on_two_ranks(strategy: str, axis: str) -> None:
    adamw = {"_target_": "dtrain.optim.adamw.build", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-4, "weight_decay": 0.1}
    (reference,) = resident(1, few_steps, PARTS | {"optim": adamw}, {})
    for rank in resident(2, few_steps, PARTS | {"optim": adamw, "strategy": STRATEGIES[strategy]}, {axis: 2}):
        # where a gradient is nearly zero, as behind projections that start at zero, rounding errors are divided by themselves
        agree(rank, reference, tolerance=1e-4)


def test_weights_of_eight_bits_move_too() -> None:
    """More of them than one vector instruction takes."""
    model = torch.nn.Linear(8, 8).bfloat16()
    before = model.weight.detach().float().clone()
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    build(model=model, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0).step()
    assert (before - model.weight.detach().float()).min() > 0.05


CASES = [
    {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    {"lr": 0.1, "betas": [0.9, 0.999], "eps": 1e-15, "weight_decay": 0},
    {"lr": 0.1, "betas": [0, 0.999], "eps": 1e-6, "weight_decay": 1},
    {"lr": 0.1, "betas": [0.9, 0], "eps": 1e-8, "weight_decay": 0.5},
    {"lr": 0.1, "betas": [0, 0], "eps": 1, "weight_decay": 0.1},
]
"""Whole numbers as people type them."""


def torchs(
    weights: dict[str, Tensor], *, betas: list[float], weight_decay: float, **options: Any
) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        by_decay(weights, weight_decay), betas=(float(betas[0]), float(betas[1])), foreach=False, fused=False, **options
    )


def test_the_update_is_torchs_at_every_size_of_gradients_and_for_every_shape() -> None:
    hold(build, torchs, ((scale, case) for scale in SCALES for case in CASES if scale > 1e-6 or case["eps"] < 1))


@pytest.mark.often("{'dp_shard': 2, 'tp': 2}")
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_the_update_is_torchs_on_every_mesh(degrees: dict[str, int]) -> None:
    hold(build, torchs, ((1e-4, case) for case in CASES[:3]), **degrees)
