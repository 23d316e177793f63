"""zero3: fsdp with reduce=every; parameters are gathered for the forward and once more for the backward, gradients stay in shards."""

from functools import partial
from typing import Any

import pytest
from pool import resident
from small import PARTS, STRATEGIES, Collectives, agree, few_steps, on_resident_mesh, tokens

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.parallel.order import parallelize

ZERO3 = {"_target_": "dtrain.strategy.zero3.build", "offload": "none"}
EVERY = STRATEGIES["fsdp"] | {"reduce": "every"}


@pytest.mark.parametrize("microbatch", [4, 2])
def test_it_is_fsdp(microbatch: int) -> None:
    """Bit for bit; where parameters rest changes no more than the order of adding."""
    reference, *_ = resident(2, partial(few_steps, PARTS | {"strategy": EVERY}, {"dp_shard": 2}, microbatch=microbatch))
    run, *_ = resident(2, partial(few_steps, PARTS | {"strategy": ZERO3}, {"dp_shard": 2}, microbatch=microbatch))
    assert run == reference
    resting, *_ = resident(
        2, partial(few_steps, PARTS | {"strategy": ZERO3 | {"offload": "cpu"}}, {"dp_shard": 2}, microbatch=microbatch)
    )
    agree(resting, reference, tolerance=1e-6)


def gathers(mesh: Mesh, word: str) -> list[int]:
    strategy: Any = build({"_target_": f"dtrain.strategy.{word}.build", "offload": "none"})
    model = construct(PARTS["model"], facts={"vocab": 16}, seed=0)
    wrapped = parallelize(model, mesh, strategy, precision=build(PARTS["precision"]), seed=0)
    counts = []
    with strategy.sync(wrapped, True):
        with Collectives() as seen:
            loss = wrapped(tokens(2, 8)).square().sum()
        counts.append(sum("gather" in name for name in seen.names))
        with Collectives() as seen:
            loss.backward()
    return [*counts, sum("gather" in name for name in seen.names)]


def test_blocks_are_gathered_again_for_the_backward() -> None:
    assert on_resident_mesh(partial(gathers, word="zero3"), dp_shard=2) == [[3, 1]] * 2, (
        "the root and the last block are needed at once"
    )
    assert on_resident_mesh(partial(gathers, word="zero1"), dp_shard=2) == [[3, 0]] * 2
