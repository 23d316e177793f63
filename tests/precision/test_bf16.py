"""bfloat16 products over fp32 weights: near fp32, the same on every mesh within what bfloat16 keeps."""

import pytest
import torch
from pool import ranks
from small import PARTS, STRATEGIES, few_steps

from dtrain.precision.bf16 import build

BF16 = PARTS | {"precision": {"_target_": "dtrain.precision.bf16.build"}}


def test_weights_and_gradients_stay_whole() -> None:
    layer, precision = torch.nn.Linear(4, 4), build()
    with precision.autocast(torch.device("cpu")):
        outputs = layer(torch.ones(2, 4))
    assert outputs.dtype == torch.bfloat16
    outputs.sum().backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def test_the_loss_is_near_that_of_fp32_and_falls_with_it() -> None:
    (full,), (half,) = ranks(1, few_steps, PARTS, {}), ranks(1, few_steps, BF16, {})
    assert half["losses"] == pytest.approx(full["losses"], rel=0.02)
    assert half["losses"] != full["losses"], "bfloat16 was used"


@pytest.mark.parametrize(("strategy", "axis"), [("ddp", "dp_replicate"), ("fsdp", "dp_shard")])
def test_it_learns_nearly_the_same_on_two_ranks(strategy: str, axis: str) -> None:
    (reference,) = ranks(1, few_steps, BF16, {})
    (run, _) = ranks(2, few_steps, BF16 | {"strategy": STRATEGIES[strategy]}, {axis: 2})
    assert run["losses"] == pytest.approx(reference["losses"], rel=2e-3)  # a bfloat16 keeps 8 bits: 4e-3
