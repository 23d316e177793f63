"""Everything in bfloat16: half the memory at rest, losses near those of fp32 on every mesh."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import resident
from small import PARTS, STRATEGIES, few_steps, joined, on_resident_mesh

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape

PRECISION = {"_target_": "dtrain.precision.bf16_true.build"}
TRUE = PARTS | {"precision": PRECISION, "model": PARTS["model"] | {"tied": False}}
MESHES: dict[str, tuple[Any, dict[str, int]]] = {
    "single": (PARTS["strategy"], {"dp_shard": 1}),
    "ddp": (STRATEGIES["ddp"], {"dp_replicate": 2}),
    "fsdp": (STRATEGIES["fsdp"], {"dp_shard": 2}),
    "tp": (STRATEGIES["ddp"], {"tp": 2}),
    "pp": (STRATEGIES["ddp"], {"pp": 2}),
}


def types(mesh: Mesh, strategy: Any) -> set[str]:
    model = construct(TRUE["model"], facts={"vocab": 13}, seed=0)
    parallelize(model, mesh, build(strategy), precision=build(PRECISION), seed=0, pipeline=PipelineShape())
    optimizer = build(
        {"_target_": "dtrain.optim.adamw.build", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        model=model,
    )
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = {
        str(value.dtype) for state in optimizer.state.values() for name, value in state.items() if name != "step"
    }
    return (
        moments
        | {str(parameter.dtype) for parameter in model.parameters()}
        | {str(parameter.grad.dtype) for parameter in model.parameters()}
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_gradients_and_optimizer_are_half_as_wide(mesh: str) -> None:
    strategy, degrees = MESHES[mesh]
    for dtypes in on_resident_mesh(partial(types, strategy=strategy), **degrees):
        assert dtypes == {"torch.bfloat16"}


@pytest.mark.parametrize("mesh", MESHES)
def test_the_losses_are_near_those_of_fp32(mesh: str) -> None:
    strategy, degrees = MESHES[mesh]
    (full,) = resident(1, partial(few_steps, TRUE | {"precision": PARTS["precision"]}, {}, microbatch=2))
    parts = TRUE | {"strategy": strategy}
    steps = partial(few_steps, parts, degrees, microbatch=2, pipeline=PipelineShape())
    runs = resident(max(degrees.values()), steps)
    run = joined(runs) if mesh == "pp" else runs[0]
    assert run["losses"] == pytest.approx(full["losses"], rel=0.02)
    assert run["losses"] != full["losses"], "bfloat16 was used"
    assert run["norms"] == pytest.approx(full["norms"], rel=0.05)


def test_fractions_that_go_into_the_model_are_converted() -> None:
    parts = PARTS | {"precision": PRECISION, "data": PARTS["data"] | {"task": "regression"}}
    parts |= {
        "model": {"_target_": "dtrain.model.mlp.MLP", "inputs": "auto", "outputs": "auto", "width": 8, "layers": 2}
    }
    parts |= {"objective": {"_target_": "dtrain.objective.regression.Regression"}}
    (run,), (full,) = (
        resident(1, partial(few_steps, p, {}, steps=2)) for p in (parts, parts | {"precision": PARTS["precision"]})
    )
    assert run["losses"] == pytest.approx(full["losses"], rel=0.05)
