"""zero1: the numbers of one process; parameters are gathered once per step, gradients cross ranks once, optimizer state is in shards."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import resident
from small import PARTS, UNEVEN, Collectives, agree, few_steps, on_resident_mesh, tokens
from torch.distributed.tensor import DTensor

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.parallel.order import parallelize

ZERO1 = {"_target_": "dtrain.strategy.zero1.build", "offload": "none"}
WHOLE = sum(parameter.numel() for parameter in construct(PARTS["model"] | {"vocab": 16}, facts={}, seed=0).parameters())


@pytest.mark.parametrize("data", [PARTS["data"], UNEVEN], ids=["dense", "uneven"])
def test_two_ranks_are_one_process(data: dict[str, Any]) -> None:
    (reference,) = resident(1, partial(few_steps, PARTS | {"data": data}, {}, microbatch=8))
    for microbatch in (4, 2):
        parts = PARTS | {"data": data, "strategy": ZERO1}
        for rank in resident(2, partial(few_steps, parts, {"dp_shard": 2}, microbatch=microbatch)):
            agree(rank, reference)


def gradients_of(model: torch.nn.Module) -> tuple[int, int]:
    """(elements of gradients that are whole, elements of those in shards) on this rank."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return (
        sum(gradient.numel() for gradient in gradients if not isinstance(gradient, DTensor)),
        sum(gradient.to_local().numel() for gradient in gradients if isinstance(gradient, DTensor)),
    )


def three_microbatches(mesh: Mesh) -> dict[str, Any]:
    strategy = build(ZERO1)
    model = construct(PARTS["model"] | {"vocab": 16}, facts={}, seed=0)
    wrapped = parallelize(model, mesh, strategy, precision=build(PARTS["precision"]), seed=0)
    gathered, reduced, gradients = [], [], []
    for number in range(3):
        with strategy.sync(wrapped, number == 2):
            with Collectives() as forward:
                loss = wrapped(tokens(2, 8, seed=mesh.rank)).square().sum()
            with Collectives() as backward:
                loss.backward()
        gathered.append([sum("gather" in name for name in seen.names) for seen in (forward, backward)])
        reduced.append(sum("reduce_scatter" in name for name in backward.names))
        gradients.append(gradients_of(model))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    moments = sum(
        v.to_local().numel() for state in optimizer.state.values() for v in state.values() if isinstance(v, DTensor)
    )
    held = sum(parameter.to_local().numel() for parameter in model.parameters() if isinstance(parameter, DTensor))
    return {"gathered": gathered, "reduced": reduced, "gradients": gradients, "moments": moments, "held": held}


def test_parameters_are_gathered_once_per_step_and_gradients_cross_once() -> None:
    for rank in on_resident_mesh(three_microbatches, dp_shard=2):
        assert rank["gathered"] == [[3, 0], [0, 0], [0, 0]], "two blocks and the root, kept from the first forward on"
        assert rank["reduced"] == [0, 0, 3]
        assert rank["gradients"] == [(WHOLE, 0), (WHOLE, 0), (0, WHOLE / 2)]


def test_a_rank_keeps_its_part_of_the_optimizer_state_and_between_steps_of_the_weights() -> None:
    for rank in on_resident_mesh(three_microbatches, dp_shard=2):
        assert rank["moments"] == WHOLE, "half of each of two"
        assert rank["held"] == WHOLE / 2
