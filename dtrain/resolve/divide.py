"""What a mesh splits must divide: heads and widths by tp, blocks by pp, experts by ep, the sequence by cp.

A model's word says in `_about_` which of its arguments those are. A model of the user's own says nothing here; its ranks find out.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.errors import WordsError
from dtrain.plan import MeshShape
from dtrain.resolve.mesh import nearest_divisors
from dtrain.resolve.pipeline import SCHEDULES
from dtrain.resolve.ranks import about

OPTIONS = {"tensor.sequence": ("whole", "split"), "tensor.loss": ("whole", "split"), "context.attention": ("ring", "ulysses")}
"""How an axis is used: key -> what is allowed."""


def model(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Raises WordsError for every axis that cannot split this model."""
    mesh, part, word = draft["mesh"], config.model, config.choices["model"]
    facts = about(part) if word else None
    problems = [*_optimizer(config, mesh), *_remat(config, mesh, draft["pipeline"].schedule)]
    if facts is not None:
        problems += [*_tensor(config, mesh, part, facts), *_pipeline(config, mesh, draft["pipeline"].stages, part, facts)]
        problems += [*_experts(mesh, part, facts, str(word)), *_context(config, mesh, part, facts)]
    if problems:
        raise WordsError(*problems)
    return {}


def options(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """How tp and cp are used. What is typed for an axis that has one rank is refused: nobody would read it."""
    mesh, problems = draft["mesh"], list[str]()
    values: dict[str, dict[str, str]] = {}
    for key, allowed in OPTIONS.items():
        group, name = key.split(".")
        value = getattr(getattr(config, group), name)
        axis = {"tensor": "tp", "context": "cp"}[group]
        if value != allowed[0] and getattr(mesh, axis) == 1 and config.sources.get(key) == "command line":
            problems.append(f"{key}={value}: the mesh has mesh.{axis}=1. Type mesh.{axis}=2, or leave {key} out.")
        values.setdefault(group, {})[name] = value
    if problems:
        raise WordsError(*problems)
    return values


def _tensor(config: Config, mesh: MeshShape, part: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterable[str]:
    if mesh.tp == 1:
        return
    if "tp" not in facts:
        yield f"mesh.tp={mesh.tp}: model={config.choices['model']} has no matrices that tensor parallelism could split. Leave mesh.tp out."
        return
    sizes = {name: part[name] for name in facts["tp"] if isinstance(part.get(name), int)}
    for name, size in sizes.items():
        if size % mesh.tp:
            fits = nearest_divisors("mesh.tp", mesh.tp, math.gcd(*sizes.values(), mesh.ranks))
            yield f"mesh.tp={mesh.tp} does not divide model.{name}={size}. {fits}"
    if config.tensor.sequence == "split":
        sequence, whole = config.data.get("sequence"), mesh.cp * mesh.tp
        if not facts.get("sequence"):
            yield f"tensor.sequence=split: model={config.choices['model']} keeps its sequences whole. Leave it out."
        elif isinstance(sequence, int) and sequence % whole:
            yield f"tensor.sequence=split: data.sequence={sequence} does not divide by cp x tp = {whole}. Type data.sequence={_up(sequence, whole)}."


def _pipeline(config: Config, mesh: MeshShape, stages: int, part: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterable[str]:
    if mesh.pp == 1:
        return
    if part.get("tied") is True:
        yield f"mesh.pp={mesh.pp}: model.tied=true is one weight in the first and the last stage. Type model.tied=false, or leave mesh.pp out."
    sizes = [part.get(name) for name in facts.get("blocks", ())]
    if sizes and all(isinstance(size, int) for size in sizes):
        blocks = math.prod(sizes)  # type: ignore[arg-type]
        names = " x ".join(f"model.{name}={part[name]}" for name in facts["blocks"])
        if blocks < mesh.pp * stages:
            yield (
                f"mesh.pp={mesh.pp} x {stages} stage(s) on each rank = {mesh.pp * stages} stages, but {names} = {blocks} blocks. "
                f"Type mesh.pp={max(1, blocks // stages)}, or model.{facts['blocks'][0]}={mesh.pp * stages}."
            )
        elif not isinstance(config.pipeline.split, str) and sum(config.pipeline.split) != blocks:
            yield f"pipeline.split={list(config.pipeline.split)} is {sum(config.pipeline.split)} blocks, but {names} = {blocks}."


def _experts(mesh: MeshShape, part: Mapping[str, Any], facts: Mapping[str, Any], word: str) -> Iterable[str]:
    experts = part.get("experts")
    if mesh.ep > 1 and "experts" not in part:
        yield f"mesh.ep={mesh.ep}: model={word} has no experts. Type model=moe, or leave mesh.ep out."
    elif isinstance(experts, int) and experts % mesh.ep:
        yield f"mesh.ep={mesh.ep} does not divide model.experts={experts}. {nearest_divisors('mesh.ep', mesh.ep, math.gcd(experts, mesh.batch))}"


def _context(config: Config, mesh: MeshShape, part: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterable[str]:
    if mesh.cp == 1:
        return
    if facts.get("takes") != "tokens":
        yield f"mesh.cp={mesh.cp}: model={config.choices['model']} has no sequence to split. Leave mesh.cp out."
        return
    sequence, whole, heads = config.data.get("sequence"), 2 * mesh.cp, part.get("heads")
    if isinstance(sequence, int) and sequence % whole:
        yield f"mesh.cp={mesh.cp}: data.sequence={sequence} does not divide by 2 x cp = {whole}. Type data.sequence={_up(sequence, whole)}."
    if config.context.attention == "ulysses" and isinstance(heads, int) and heads % (mesh.cp * mesh.tp):
        yield f"context.attention=ulysses: cp x tp = {mesh.cp * mesh.tp} does not divide model.heads={heads}. Type context.attention=ring."


def _optimizer(config: Config, mesh: MeshShape) -> Iterable[str]:
    """Adafactor's sums run over one axis."""
    if about(config.optim).get("axes") == "data" and mesh.tp * mesh.ep > 1:
        axis = "tp" if mesh.tp > 1 else "ep"
        yield f"optim={config.choices['optim']} knows the axes of the data alone, and the mesh has {axis}={getattr(mesh, axis)}. Type optim=adamw."


def _remat(config: Config, mesh: MeshShape, schedule: str) -> Iterable[str]:
    """What experts and split sequences compute in place while they talk cannot be kept for a second pass through a block.

    A backward in halves goes through a block once for its inputs and once for each group of its weights: torch computes the block again every time,
    keeps it all, and with remat=selective refuses (torch/utils/checkpoint.py of torch 2.13).
    """
    word = config.choices["remat"]
    for axis in ("cp", "ep"):
        if getattr(mesh, axis) > 1 and word == "selective":
            yield f"remat=selective keeps results inside a block, which mesh.{axis}={getattr(mesh, axis)} changes there. Type remat=full."
    if mesh.pp > 1 and SCHEDULES[schedule].halves and word != "none":
        yield (
            f"remat={word}: pipeline.schedule={schedule} goes backward in halves and would keep more with it than without. "
            "Type remat=none, or pipeline.schedule=interleaved_1f1b."
        )


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
