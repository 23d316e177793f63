"""zero2: the numbers of one process; gradients of every microbatch cross ranks, and a rank keeps the sum of its shard."""

from functools import partial
from typing import Any

import pytest
from pool import resident
from small import PARTS, UNEVEN, Collectives, agree, few_steps, on_resident_mesh, tokens
from torch.distributed.tensor import DTensor

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.parallel.order import parallelize

ZERO2 = {"_target_": "dtrain.strategy.zero2.build", "offload": "none"}


@pytest.mark.parametrize("data", [PARTS["data"], UNEVEN], ids=["dense", "uneven"])
def test_two_ranks_are_one_process(data: dict[str, Any]) -> None:
    (reference,) = resident(1, partial(few_steps, PARTS | {"data": data}, {}, microbatch=8))
    for microbatch in (4, 1):
        parts = PARTS | {"data": data, "strategy": ZERO2}
        for rank in resident(2, partial(few_steps, parts, {"dp_shard": 2}, microbatch=microbatch)):
            agree(rank, reference)


def three_microbatches(mesh: Mesh) -> dict[str, Any]:
    strategy = build(ZERO2)
    model = construct(PARTS["model"] | {"vocab": 16}, facts={}, seed=0)
    wrapped = parallelize(model, mesh, strategy, precision=build(PARTS["precision"]), seed=0)
    gathered, reduced, held = [], [], []
    for number in range(3):
        with strategy.sync(wrapped, number == 2), Collectives() as seen:
            wrapped(tokens(2, 8, seed=mesh.rank)).square().sum().backward()
        gathered.append(sum("gather" in name for name in seen.names))
        reduced.append(sum("reduce_scatter" in name for name in seen.names))
        held.append(
            sum(p.grad.numel() for p in model.parameters() if p.grad is not None and not isinstance(p.grad, DTensor))
        )
    shards = sum(p.grad.to_local().numel() for p in model.parameters() if isinstance(p.grad, DTensor))
    return {"gathered": gathered, "reduced": reduced, "whole": held, "shards": shards}


def test_gradients_cross_ranks_in_every_microbatch_and_parameters_once() -> None:
    whole = sum(p.numel() for p in construct(PARTS["model"] | {"vocab": 16}, facts={}, seed=0).parameters())
    for rank in on_resident_mesh(three_microbatches, dp_shard=2):
        assert rank["reduced"] == [3, 3, 3], "two blocks and the root"
        assert rank["gathered"] == [3, 0, 0]
        assert rank["whole"] == [0, 0, 0], "no microbatch leaves a whole gradient behind"
        assert rank["shards"] == whole / 2
