"""bfloat16 products over fp32 weights: near fp32, the same on every mesh within what bfloat16 keeps."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from pool import resident
from small import PARTS, STRATEGIES, few_steps, plan
from torch import nn

from dtrain.precision.bf16 import build
from dtrain.train import train

BF16 = PARTS | {"precision": {"_target_": "dtrain.precision.bf16.build"}}


def test_weights_and_gradients_stay_whole() -> None:
    layer, precision = torch.nn.Linear(4, 4), build()
    with precision.autocast(torch.device("cpu")):
        outputs = layer(torch.ones(2, 4))
    assert outputs.dtype == torch.bfloat16
    outputs.sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def test_the_loss_is_near_that_of_fp32_and_falls_with_it() -> None:
    (full,), (half,) = resident(1, few_steps, PARTS, {}), resident(1, few_steps, BF16, {})
    assert half["losses"] == pytest.approx(full["losses"], rel=0.02)
    assert half["losses"] != full["losses"], "bfloat16 was used"


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard")])
def test_it_learns_nearly_the_same_on_two_ranks(strategy: str, axis: str) -> None:
    (reference,) = resident(1, few_steps, BF16, {})
    (run, _) = resident(2, few_steps, BF16 | {"strategy": STRATEGIES[strategy]}, {axis: 2})
    assert run["losses"] == pytest.approx(reference["losses"], rel=2e-3)  # a bfloat16 keeps 8 bits: 4e-3


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm((8, 3)), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.InstanceNorm1d(8, affine=True, track_running_stats=True)], ids=lambda norm: type(norm).__name__
)  # fmt: skip
def test_a_norm_takes_what_is_whole_with_parameters_that_were_gathered_half(norm: nn.Module) -> None:
    gathered, x = deepcopy(norm), torch.randn(4, 8, 3)
    for parameter in gathered.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    with build().autocast(torch.device("cpu")):
        outputs = gathered(x)
    outputs.sum().backward()
    torch.testing.assert_close(outputs, norm(x))
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in gathered.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_norms_of_a_model_that_is_not_ours_train_alike_plain_and_sharded(precision: str, tmp_path: Path) -> None:
    words = (
        "model._target_=invariance.zoo.Plain", "trust=[invariance]", "data=synthetic", "objective=classification", "batch=8", "steps=3", "data.samples=64",
        "devices=2", f"precision={precision}", "optim=sgd", "precision.scale=1024" if precision == "fp16" else "seed=0", "logger=[]", "hook=[]",
    )  # fmt: skip
    copies, shards = (
        resident(2, train, plan(*words, f"strategy={name}", f"out={tmp_path / name}"))[0] for name in ("ddp", "fsdp")
    )
    assert shards.loss == pytest.approx(copies.loss, rel=2e-3)
