"""Ranks that reach different parts of a sharded model: the numbers of one process, or a sentence before anything moves."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import RankFailed, ranks, resident
from reaching import parts
from small import STRATEGIES, agree, few_steps, on_resident_mesh
from torch import nn

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.parallel.order import parallelize
from dtrain.strategy.fsdp import FSDP
from dtrain.strategy.units import METHODS, units

SHARDED = {
    "fsdp": STRATEGIES["fsdp"],
    "cpu": STRATEGIES["fsdp"] | {"offload": "cpu"},
    **{word: {"_target_": f"dtrain.strategy.{word}.build", "offload": "none"} for word in ("zero1", "zero2", "zero3")},
}


@pytest.mark.parametrize("strategy", SHARDED)
def test_weights_shared_by_two_blocks_and_blocks_that_are_never_called(strategy: str) -> None:
    (reference,) = resident(1, few_steps, parts("Knotted"), {})
    for precision in ("fp32", "bf16") if strategy == "fsdp" else ("fp32",):
        changed = {"strategy": SHARDED[strategy], "precision": {"_target_": f"dtrain.precision.{precision}.build"}}
        run = resident(2, partial(few_steps, parts("Knotted", **changed), {"dp_shard": 2}, microbatch=2))[0]
        agree(run, reference, tolerance=1e-5 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_weights_of_a_block_that_layers_outside_of_it_use(strategy: str) -> None:
    (reference,) = resident(1, few_steps, parts("Lent"), {})
    agree(resident(2, partial(few_steps, parts("Lent", strategy=SHARDED[strategy]), {"dp_shard": 2}))[0], reference)


def two_steps(model: str, strategy: str) -> Any:
    return few_steps(parts(model, strategy=SHARDED[strategy]), {"dp_shard": 2}, microbatch=1, steps=8)


@pytest.mark.parametrize("model", ["Branches", "Lost", "Late"])
@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
def test_ranks_that_call_different_blocks_are_stopped_by_their_names(model: str, strategy: str) -> None:
    with pytest.raises(
        RankFailed, match=r"strategy: rank \d .*(left|right)\.\d.* where (rank \d|the first step) .*(left|right)\.\d"
    ) as error:
        ranks(2, two_steps, model, strategy)
    assert (
        "Type strategy=ddp" in str(error.value)
        and "FSDP" not in str(error.value).split("strategy: rank")[1].splitlines()[0]
    )


@pytest.mark.parametrize(("unused", "calm"), [(False, 0), (True, 0), (False, 3)])
def test_ranks_that_do_not_all_call_experts_are_stopped_by_their_names(unused: bool, calm: int) -> None:
    """They would wait for rows of each other for ever."""
    chosen = {"model": {"_target_": "reaching.Skipping", "unused": unused, "calm": calm}, "strategy": STRATEGIES["ddp"]}
    with pytest.raises(
        RankFailed,
        match=r"strategy: rank \d .* where (rank \d|the first step) .*, but all ranks must call the experts that mesh\.ep splits",
    ) as error:
        resident(2, partial(few_steps, parts("Ways") | chosen, {"dp_replicate": 2, "ep": 2}, microbatch=1, steps=8))
    assert "mixtures.1.experts" in str(error.value)


def private_parts(mesh: Mesh) -> list[str]:
    model = parallelize(
        nn.Sequential(nn.Linear(4, 4)),
        mesh,
        FSDP(reshard="forward", offload="none"),
        precision=build(parts("Ways")["precision"]),
        seed=0,
    )
    model(torch.ones(1, 4)).sum().backward()
    ((name, group),) = [(name, group) for name, group in units(model) if group.fsdp_params]
    methods = [*(method for method, _ in METHODS), "reduce_grads", "_training_state", "_register_post_backward_hook"]
    of_parameters = [
        "sharded_param",
        "unsharded_param",
        "_unsharded_param",
        "unsharded_accumulated_grad",
        "accumulate_unsharded_grad_if_needed",
        "to_accumulated_grad_if_needed",
    ]
    state = model[0]._get_fsdp_state()  # type: ignore[index, operator]
    return [
        name,
        *(() if state._fsdp_param_groups == [group] else ("_fsdp_param_groups",)),
        *(each for each in methods if not hasattr(group, each)),
        *(each for each in of_parameters if not hasattr(group.fsdp_params[0], each)),
    ]


def test_the_private_parts_of_fsdp2_are_where_they_were() -> None:
    assert on_resident_mesh(private_parts, dp_shard=2) == [["0"]] * 2
