"""Muon: hidden matrices apart from the rest, updates without preferred directions, the same on shards."""

from typing import Any

import pytest
import torch
from golden import MESHES, SCALES, by_decay
from golden import agree as hold
from pool import resident
from small import CPUS, PARTS, STRATEGIES, agree, few_steps, plan, small_gpt
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.cluster import Cluster
from dtrain.errors import WordsError
from dtrain.model.cnn import CNN
from dtrain.model.mlp import MLP
from dtrain.optim import OptimizerGroup
from dtrain.optim.muon import build, hidden_matrices, orthogonalize
from dtrain.parallel.stages import keep

ARGUMENTS = {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.1, "adamw_lr": None, "betas": [0.9, 0.95], "eps": 1e-8}
GPU = Cluster(gpus=1, cpus=8)
MUON = {"_target_": "dtrain.optim.muon.build", **ARGUMENTS}


@pytest.mark.parametrize("tied", [True, False])
def test_hidden_matrices_are_those_inside_the_blocks(tied: bool) -> None:
    model = small_gpt(tied=tied)
    chosen = set(map(id, hidden_matrices(model)))
    names = {name for name, parameter in model.named_parameters() if id(parameter) in chosen}
    assert names == {
        name for name, parameter in model.named_parameters() if name.startswith("blocks.") and parameter.ndim == 2
    }


def test_the_last_layer_and_biases_are_left_to_adamw() -> None:
    model = MLP(inputs=4, outputs=3, width=5, layers=2)
    muon, *adamw = build(model=model, **ARGUMENTS).param_groups
    assert [tuple(p.shape) for p in muon["params"]] == [(5, 4), (5, 5)]
    assert sorted(tuple(p.shape) for group in adamw for p in group["params"]) == [(3,), (3, 5), (5,), (5,)]


def test_a_norm_of_two_dims_is_no_matrix() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm([2, 3]), torch.nn.Linear(3, 2))
    assert [tuple(each.shape) for each in hidden_matrices(model)] == [(3, 4)]


def test_every_weight_is_in_exactly_one_group() -> None:
    model = small_gpt(tied=False)
    members = [id(p) for group in build(model=model, **ARGUMENTS).param_groups for p in group["params"]]
    assert sorted(members) == sorted(map(id, model.parameters()))


def test_the_rest_may_have_a_learning_rate_of_its_own() -> None:
    model = MLP(inputs=4, outputs=3, width=5, layers=1)
    assert [group["lr"] for group in build(model=model, **ARGUMENTS | {"adamw_lr": 0.5}).param_groups] == [
        0.01,
        0.5,
        0.5,
    ]
    assert [group["lr"] for group in build(model=model, **ARGUMENTS).param_groups] == [0.01, 0.01, 0.01]


def test_an_update_has_all_singular_values_near_one() -> None:
    """Newton-Schulz brings them between 0.7 and 1.2 (kellerjordan.github.io/posts/muon), whatever the gradient's are."""
    model = MLP(inputs=48, outputs=3, width=16, layers=1)
    before = model.layers[0].weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    model.layers[0].weight.grad *= torch.logspace(0, 0.7, 16)[:, None]
    build(model=model, **ARGUMENTS | {"weight_decay": 0.0}).step()
    values = torch.linalg.svdvals((before - model.layers[0].weight.detach()) / 0.01)
    assert 0.5 < values.min() < values.max() < 1.4


def test_products_are_of_the_type_that_is_asked_for() -> None:
    """In bf16 the direction is that of fp32 to three digits (5 iterations), and what is returned for a tall matrix lies as the matrix does."""
    matrices = torch.randn(2, 48, 16, generator=torch.Generator().manual_seed(0))

    class Types(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.baddbmm.default, torch.ops.aten.bmm.default):
                seen.add(args[0].dtype)
            return func(*args, **kwargs or {})

    seen = set[torch.dtype]()
    with Types():
        half = orthogonalize(matrices, torch.bfloat16)
    assert seen == {torch.bfloat16}
    whole = orthogonalize(matrices, torch.float32)
    assert half.shape == whole.shape and torch.cosine_similarity(half.float().flatten(), whole.flatten(), dim=0) > 0.995


@pytest.mark.parametrize(
    ("words", "on", "type"),
    [
        (("precision=bf16",), GPU, "bf16"),
        ((), GPU, "fp32"),  # by the precision of a small model
        (("precision=fp32",), GPU, "fp32"),
        (("precision=tf32",), GPU, "fp32"),
        (("precision=bf16",), CPUS, "fp32"),
        (("precision=bf16", "optim.products=bf16"), CPUS, "bf16"),
    ],
)
def test_products_follow_the_precision_on_a_gpu(words: tuple[str, ...], on: Cluster, type: str) -> None:
    assert plan("optim=muon", "devices=1", *words, on=on).optim["products"] == type


def test_a_model_without_hidden_matrices_is_refused_with_what_to_type() -> None:
    with pytest.raises(WordsError, match="Type optim=adamw"):
        build(model=CNN(inputs=[1, 8, 8], outputs=3, width=4, stages=1, blocks=1), **ARGUMENTS)


def test_several_optimizers_are_used_as_one() -> None:
    model = MLP(inputs=4, outputs=3, width=5, layers=1)
    made, steps = build(model=model, **ARGUMENTS), []
    assert isinstance(made, OptimizerGroup)
    made.register_step_post_hook(lambda *_: steps.append(1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    assert set(made.state) == set(model.parameters())
    assert steps == [1]


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard")])
def test_it_learns_the_same_on_two_ranks(strategy: str, axis: str) -> None:
    (reference,) = resident(1, few_steps, PARTS | {"optim": MUON}, {})
    for rank in resident(2, few_steps, PARTS | {"optim": MUON, "strategy": STRATEGIES[strategy]}, {axis: 2}):
        agree(rank, reference, tolerance=2e-5)  # some matrices start at zero and hold four updates alone


def test_on_a_stage_of_a_pipeline_the_last_layer_is_where_the_head_stands() -> None:
    whole, first, last = small_gpt(), small_gpt(), small_gpt()
    keep(first, ["embed", "blocks.0"], ["embed", "blocks.0", "blocks.1", "norm", "head"])
    keep(last, ["blocks.1", "norm", "head"], ["embed", "blocks.0", "blocks.1", "norm", "head"])
    assert len(hidden_matrices(first)) == len(hidden_matrices(last)) == len(hidden_matrices(whole)) / 2


CASES = [
    {"lr": 0.1, "momentum": 0.95, "weight_decay": 0.1, "adamw_lr": None, "betas": [0.9, 0.95], "eps": 1e-8},
    {"lr": 0.3, "momentum": 0, "weight_decay": 0, "adamw_lr": 0.01, "betas": [0, 0.95], "eps": 1e-8},
]


class Published:
    """The code of the post (https://kellerjordan.github.io/posts/muon) in the type of the weights, with torch.optim.Muon's mean for a momentum."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        adamw_lr: float | None,
        **adamw: Any,
    ) -> None:
        self.matrices = [weight for weight in weights.values() if weight.ndim == 2 and min(weight.shape) > 1]
        self.lr, self.momentum, self.decay = lr, momentum, weight_decay
        self.buffers = [torch.zeros_like(matrix) for matrix in self.matrices]
        rest = {name: weight for name, weight in weights.items() if weight.ndim != 2 or min(weight.shape) == 1}
        betas = tuple(map(float, adamw.pop("betas")))
        self.rest = torch.optim.AdamW(
            by_decay(rest, weight_decay), lr=adamw_lr or lr, betas=betas, foreach=False, fused=False, **adamw
        )

    @torch.no_grad()
    def step(self) -> None:
        for matrix, buffer in zip(self.matrices, self.buffers, strict=True):
            if matrix.grad is None:
                continue
            buffer.mul_(self.momentum).add_(matrix.grad * (1 - self.momentum))
            x = matrix.grad * (1 - self.momentum) + buffer * self.momentum
            tall = x.shape[0] > x.shape[1]
            x = x.T if tall else x
            x = x / max(x.norm().item(), 1e-7)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            x = x.T if tall else x
            matrix.mul_(1 - self.lr * self.decay).sub_(
                x * (self.lr * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5)
            )
        self.rest.step()


def test_the_update_is_the_published_one_at_every_size_of_gradients_and_for_every_shape() -> None:
    hold(build, Published, ((scale, case) for scale in SCALES for case in CASES))


@pytest.mark.often("{'dp_shard': 3}", "{'tp': 2}")
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_the_update_is_the_published_one_on_every_mesh(degrees: dict[str, int]) -> None:
    hold(build, Published, ((scale, case) for scale in (1e-8, 1e-4, 1e2) for case in CASES), **degrees)


def test_a_learning_rate_of_zero_for_the_rest_is_zero() -> None:
    model = MLP(inputs=4, outputs=3, width=5, layers=1)
    assert [group["lr"] for group in build(model=model, **ARGUMENTS | {"adamw_lr": 0}).param_groups] == [0.01, 0, 0]


def test_a_stage_of_a_pipeline_may_have_no_hidden_matrix() -> None:
    last = small_gpt()
    keep(last, ["norm", "head"], ["embed", "blocks.0", "blocks.1", "norm", "head"])
    assert not hidden_matrices(last)
    assert {id(p) for group in build(model=last, **ARGUMENTS).param_groups for p in group["params"]} == set(
        map(id, last.parameters())
    )
