"""Weights that a parent uses outside of the forward of the block they belong to: the numbers of one process, under everything that shards."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import resident
from reaching import parts
from small import STRATEGIES, agree, few_steps, mesh_of

from dtrain.build import build
from dtrain.model import construct, evaluating
from dtrain.parallel.order import parallelize

SHARDED = {
    "fsdp": STRATEGIES["fsdp"],
    "cpu": STRATEGIES["fsdp"] | {"offload": "cpu"},
    **{word: {"_target_": f"dtrain.strategy.{word}.build", "offload": "none"} for word in ("zero1", "zero2")},
}
BORROWING = {
    "weights": {"_target_": "reaching.Borrowing"},
    "penalty": {"_target_": "reaching.Borrowing", "penalty": 0.01},
}


def run(model: str, strategy: dict[str, Any], world: int = 2, **changed: Any) -> Any:
    """Steps on the first of `world` ranks."""
    degrees = {"dp_replicate": world // 2, "dp_shard": 2} if world > 1 else {"dp_shard": 1}
    made = parts("Borrowing") | {"model": BORROWING[model], "strategy": strategy} | changed
    return resident(world, partial(few_steps, made, degrees, microbatch=2))[0]


@pytest.mark.often("weights")
@pytest.mark.parametrize("model", BORROWING)
def test_weights_used_outside_of_their_block_count_as_in_one_process(model: str) -> None:
    reference = run(model, STRATEGIES["ddp"], 1)
    for strategy in SHARDED.values():
        agree(run(model, strategy), reference)
    for world in (1, 4):
        agree(run(model, SHARDED["fsdp"], world), reference)
    agree(run(model, SHARDED["fsdp"], remat={"_target_": "dtrain.remat.full.build"}), reference)


def answers(strategy: dict[str, Any], degrees: dict[str, int]) -> list[list[float]]:
    x = torch.arange(12.0).view(3, 4) / 12
    with mesh_of(**degrees) as mesh:
        model = construct({"_target_": "reaching.Borrowing"}, facts={}, seed=0)
        wrapped = parallelize(model, mesh, build(strategy), precision=build(parts("Ways")["precision"]), seed=0)
        given = []
        for _ in range(2):
            with evaluating(wrapped):
                given.append(wrapped(x).flatten().tolist())
        wrapped(x).sum().backward()
        return given


def test_an_evaluation_that_uses_them_before_a_step_gives_what_the_model_gives_whole() -> None:
    (whole,) = resident(1, answers, STRATEGIES["ddp"], {})
    assert resident(2, answers, STRATEGIES["fsdp"], {"dp_shard": 2}) == [whole, whole]
