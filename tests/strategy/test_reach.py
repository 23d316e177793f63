"""Weights that a parent uses outside of the forward of the block they belong to: the numbers of one process, under everything that shards."""

from typing import Any

import pytest
import torch
from pool import ranks
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


@pytest.mark.parametrize("model", BORROWING)
def test_weights_used_outside_of_their_block_count_as_in_one_process(model: str) -> None:
    def run(strategy: dict[str, Any], degrees: dict[str, int], **changed: Any) -> Any:
        return few_steps(
            parts("Borrowing") | {"model": BORROWING[model], "strategy": strategy} | changed, degrees, microbatch=2
        )

    (reference,) = ranks(1, run, STRATEGIES["ddp"], {})
    for strategy in SHARDED.values():
        agree(ranks(2, run, strategy, {"dp_shard": 2})[0], reference)
    agree(ranks(4, run, SHARDED["fsdp"], {"dp_replicate": 2, "dp_shard": 2})[0], reference)
    agree(ranks(1, run, SHARDED["fsdp"], {"dp_shard": 1})[0], reference)
    agree(
        ranks(2, lambda: run(SHARDED["fsdp"], {"dp_shard": 2}, remat={"_target_": "dtrain.remat.full.build"}))[0],
        reference,
    )


def test_an_evaluation_that_uses_them_before_a_step_gives_what_the_model_gives_whole() -> None:
    x = torch.arange(12.0).view(3, 4) / 12

    def answers(strategy: dict[str, Any], degrees: dict[str, int]) -> list[list[float]]:
        with mesh_of(**degrees) as mesh:
            model = construct({"_target_": "reaching.Borrowing"}, facts={}, seed=0)
            wrapped = parallelize(model, mesh, build(strategy), precision=build(parts("Ways")["precision"]), seed=0)
            given = []
            for _ in range(2):
                with evaluating(wrapped):
                    given.append(wrapped(x).flatten().tolist())
            wrapped(x).sum().backward()
            return given

    (whole,) = ranks(1, answers, STRATEGIES["ddp"], {})
    assert ranks(2, answers, STRATEGIES["fsdp"], {"dp_shard": 2}) == [whole, whole]
