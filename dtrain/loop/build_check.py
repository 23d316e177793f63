"""Checks that the model was built as planned: each rank inspects its model, and the results are compared with the plan.

A wrapper that silently does less than it should (https://github.com/huggingface/accelerate does so with FSDP2 on the
CPU) ends the run before its first step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dtrain.errors import DtrainError, WordsError
from dtrain.loop.assemble import Parts
from dtrain.mesh.sharding import axes_of, local
from dtrain.model.moe import experts_of
from dtrain.parallel.pipeline import Pipeline
from dtrain.planned import Plan
from dtrain.precision import Precision


def check(parts: Parts) -> dict[str, Any]:
    """The event of what the ranks built; all ranks call it. Raises DtrainError if it differs from the plan, and
    WordsError if their datasets differ in length.
    """
    samples = {"samples": len(parts.source), "held_out": 0 if parts.heldout is None else len(parts.heldout)}
    ranks = parts.mesh.gather(inspect(parts) | samples)
    compare_lengths(ranks)
    return judge(parts.plan, ranks, parts.precision)


def inspect(parts: Parts) -> dict[str, Any]:
    """Facts of this rank, as JSON: numbers of parameters, in all, without dims and by the axis they are split over,
    those that are frozen though they were trained or the other way round, types, stages.
    """
    model, forward = parts.model, parts.forward
    split: dict[str, int] = {}
    whole = here = 0
    experts = {id(parameter) for module in experts_of(model) for parameter in module.parameters()}
    for parameter in model.parameters():
        whole += parameter.numel()
        here += local(parameter).numel()
        for axis in (*["experts"] * (id(parameter) in experts), *_axes(parameter)):
            split[axis] = split.get(axis, 0) + parameter.numel()
    floats = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return {
        "rank": parts.mesh.rank,
        "holds": parts.strategy.holds,
        "parameters": whole,
        "held": here,
        "split": split,
        "toggled": [name for name, each in model.named_parameters() if each.requires_grad != (name in parts.trained)],
        "dimless": sum(parameter.ndim == 0 for parameter in model.parameters()),
        "types": sorted(map(type_name, floats)),
        "stages": sorted(forward.stages) if isinstance(forward, Pipeline) else [],
        "schedule": forward.shape.schedule if isinstance(forward, Pipeline) else None,
        "wrapper": type(forward).__name__,
    }


def compare_lengths(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises WordsError if the ranks count different samples: each would walk through an order of its own."""
    lengths = [f"{facts['samples']} samples and {facts['held_out']} held out" for facts in ranks]
    other = next((rank for rank, length in enumerate(lengths) if length != lengths[0]), None)
    if other is not None:
        raise WordsError(
            f"data: rank 0 has {lengths[0]}, rank {other} has {lengths[other]}. Every rank must read the same dataset: "
            "its __len__ must not depend on the rank, and its files must be the same on every host."
        )


def judge(plan: Plan, ranks: Sequence[Mapping[str, Any]], precision: Precision) -> dict[str, Any]:
    """The `built` event. Raises DtrainError if it differs from the plan."""
    param = type_name(precision.param)
    problems = [f"rank {facts['rank']}: {problem}" for facts in ranks for problem in _problems(plan, facts, param)]
    if problems:
        raise DtrainError("what was built is not what was asked. " + "; ".join(problems[:4]))
    return {"compute": type_name(precision.compute), "ranks": list(ranks)}


def type_name(dtype: torch.dtype) -> str:
    """float32"""
    return str(dtype).removeprefix("torch.")


def _problems(plan: Plan, facts: Mapping[str, Any], param: str) -> list[str]:
    mesh, split = plan.mesh, facts["split"]
    experts = split.get("experts", 0)
    dense = facts["parameters"] - experts - facts["dimless"]
    shards = mesh.dp_shard * mesh.cp if facts["holds"] == "shards" else 1
    problems = [f"requires_grad of {name} was changed" for name in facts["toggled"]]
    if shards > 1 and split.get("dp_shard", 0) < (dense if mesh.ep > 1 else dense + experts):
        problems.append(f"of {dense} parameters {split.get('dp_shard', 0)} are sharded over dp_shard x cp = {shards}")
    if mesh.tp > 1 and mesh.pp == 1 and not split.get("tp"):
        problems.append(f"no parameter is split over tp={mesh.tp}")
    if mesh.ep > 1 and split.get("ep", 0) != experts:
        problems.append(f"of {experts} parameters of experts {split.get('ep', 0)} are split over ep={mesh.ep}")
    if param != "float32" and facts["types"] not in ([param], []):
        problems.append(f"weights are {', '.join(facts['types'])}, not {param}")
    owners = plan.pipeline.owners(mesh.pp) if mesh.pp > 1 else ()
    stages = [stage for stage, owner in enumerate(owners) if owner == facts["rank"] // (mesh.batch * mesh.tp)]
    if facts["stages"] != stages or (mesh.pp > 1 and facts["schedule"] != plan.pipeline.schedule):
        problems.append(
            f"it holds the stages {facts['stages']} of {facts['schedule']}, not {stages} of {plan.pipeline.schedule}"
        )
    return problems


def _axes(parameter: nn.Parameter) -> list[str]:
    """The axes that a parameter is split over."""
    names = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
    return [names[axis] for axis in axes_of(parameter, None)]
