"""Sizes that a mesh splits must divide: heads and widths by tp, blocks by pp, experts by ep, the sequence by cp.

The `_about_` of a model's word names those arguments. For a user's own model only the sequence is checked, which the
data states.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about, fact
from dtrain.config.schema import Config
from dtrain.errors import WordsError
from dtrain.planned import MeshShape, PipelineShape
from dtrain.resolve.mesh import nearest_divisors

OPTIONS = {
    "tensor.sequence": ("whole", "split"),
    "tensor.loss": ("whole", "split"),
    "context.attention": ("ring", "ulysses"),
}
"""Key that sets how an axis is used -> allowed values, the default first."""


def model(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Raises WordsError for every axis that cannot split this model."""
    mesh, part, word = draft["mesh"], config.model, config.choices["model"]
    facts = about(part) if word else None
    problems = [*_optimizer(config, part), *_remat(config, mesh, draft["pipeline"])]
    if facts is not None:
        problems += [
            *_tensor(config, mesh, part, facts),
            *_pipeline(config, mesh, draft["pipeline"].stages, part, facts),
        ]
        problems += [*_experts(mesh, part, facts, str(word)), *_context(config, mesh, part, facts)]
    elif about(config.data).get("gives") == "tokens" or config.choices["objective"] == "next_token":
        problems += _sequence(config, mesh)
    if problems:
        raise WordsError(*problems)
    return {}


def options(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Decide how tp and cp are used. An option typed for an axis of one rank is refused, as nothing reads it."""
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


def rows(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Check padded rows: some layouts need rows of one fixed length, which the mesh must divide."""
    mesh, data, part = draft["mesh"], config.data, config.model
    if "pad" not in data:
        return {}
    pad, length = data["pad"], data["length"]
    split = config.tensor.sequence == "split" and mesh.tp > 1
    needs = {
        f"mesh.pp={mesh.pp}": mesh.pp > 1,
        f"mesh.cp={mesh.cp}": mesh.cp > 1,
        "tensor.sequence=split": split,
        "model.balance": "balance" in part,
    }
    problems = []
    if length is not None and pad is None:
        problems.append(
            "data.length: rows are not padded. Type data.pad=<the padding token> as well, or leave data.length out."
        )
    elif pad is not None and length is None and any(needs.values()):
        why = next(name for name, needed in needs.items() if needed)
        problems.append(
            f"data.pad={pad}: {why} needs rows of one length in every batch. Type data.length=<the longest row>."
        )
    whole = math.lcm(2 * mesh.cp if mesh.cp > 1 else 1, mesh.cp * mesh.tp if split else 1)
    if isinstance(length, int) and length % whole:
        problems.append(
            f"data.length={length} is not divisible by {whole}, into which mesh.cp and mesh.tp cut a row. Type "
            f"data.length={_up(length, whole)}."
        )
    inputs = data.get("inputs")
    if mesh.cp > 1 and pad is not None and isinstance(inputs, list | tuple) and "attention_mask" in inputs:
        problems.append(
            f"mesh.cp={mesh.cp}: attention_mask of data.inputs masks tokens, which does not work on a part of a "
            "sequence. Leave it out for a causal model, which never attends to the padding after a row, or leave "
            "mesh.cp out."
        )
    if problems:
        raise WordsError(*problems)
    return {}


def _tensor(config: Config, mesh: MeshShape, part: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterable[str]:
    if mesh.tp == 1:
        return
    if "tp" not in facts:
        yield (
            f"mesh.tp={mesh.tp}: model={config.choices['model']} has no matrices that tensor parallelism could "
            "split. Leave mesh.tp out."
        )
        return
    sizes = {name: part[name] for name in facts["tp"] if isinstance(part.get(name), int)}
    for name, size in sizes.items():
        if size % mesh.tp:
            fits = nearest_divisors("mesh.tp", mesh.tp, math.gcd(*sizes.values(), mesh.ranks))
            yield f"mesh.tp={mesh.tp} does not divide model.{name}={size}. {fits}"
    # shared experts form one feed-forward layer of their combined width
    shared = (part.get("shared"), part.get("hidden"))
    if all(isinstance(size, int) for size in shared) and math.prod(shared) % mesh.tp:  # type: ignore[arg-type]
        yield (
            f"mesh.tp={mesh.tp} does not divide model.shared={shared[0]} x model.hidden={shared[1]}. Type "
            f"model.hidden={_up(shared[1], mesh.tp)}."  # type: ignore[arg-type]
        )
    if config.tensor.sequence == "split":
        sequence, whole = config.data.get("sequence"), mesh.cp * mesh.tp
        if not facts.get("sequence"):
            yield f"tensor.sequence=split: model={config.choices['model']} keeps its sequences whole. Leave it out."
        elif isinstance(sequence, int) and sequence % whole:
            yield (
                f"tensor.sequence=split: data.sequence={sequence} is not divisible by cp x tp = {whole}. Type "
                f"data.sequence={_up(sequence, whole)}."
            )


def _pipeline(
    config: Config, mesh: MeshShape, stages: int, part: Mapping[str, Any], facts: Mapping[str, Any]
) -> Iterable[str]:
    if mesh.pp == 1:
        return
    if part.get("tied") is True:
        yield (
            f"mesh.pp={mesh.pp}: model.tied=true is one weight in the first and the last stage. Type "
            "model.tied=false, or leave mesh.pp out."
        )
    sizes = [part.get(name) for name in facts.get("blocks", ())]
    if sizes and all(isinstance(size, int) for size in sizes):
        blocks = math.prod(sizes)  # type: ignore[arg-type]
        names = " x ".join(f"model.{name}={part[name]}" for name in facts["blocks"])
        if blocks < mesh.pp * stages:
            yield (
                f"mesh.pp={mesh.pp} x {stages} stage(s) on each rank = {mesh.pp * stages} stages, but {names} = "
                f"{blocks} blocks. "
                f"Type mesh.pp={max(1, blocks // stages)}, or model.{facts['blocks'][0]}={mesh.pp * stages}."
            )
        elif not isinstance(config.pipeline.split, str) and sum(config.pipeline.split) != blocks:
            yield (
                f"pipeline.split={list(config.pipeline.split)} is {sum(config.pipeline.split)} blocks, but {names} "
                f"= {blocks}."
            )


def _experts(mesh: MeshShape, part: Mapping[str, Any], facts: Mapping[str, Any], word: str) -> Iterable[str]:
    experts = part.get("experts")
    if mesh.ep > 1 and "experts" not in part:
        yield f"mesh.ep={mesh.ep}: model={word} has no experts. Type model=moe, or leave mesh.ep out."
    elif isinstance(experts, int) and experts % mesh.ep:
        yield (
            f"mesh.ep={mesh.ep} does not divide model.experts={experts}. "
            f"{nearest_divisors('mesh.ep', mesh.ep, math.gcd(experts, mesh.batch))}"
        )


def _context(config: Config, mesh: MeshShape, part: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterable[str]:
    if mesh.cp == 1:
        return
    if facts.get("takes") != "tokens":
        yield f"mesh.cp={mesh.cp}: model={config.choices['model']} has no sequence to split. Leave mesh.cp out."
        return
    yield from _sequence(config, mesh)
    heads = part.get("heads")
    if config.context.attention == "ulysses" and isinstance(heads, int) and heads % (mesh.cp * mesh.tp):
        yield (
            f"context.attention=ulysses: cp x tp = {mesh.cp * mesh.tp} does not divide model.heads={heads}. Type "
            "context.attention=ring."
        )


def _sequence(config: Config, mesh: MeshShape) -> Iterable[str]:
    sequence, whole = config.data.get("sequence"), 2 * mesh.cp
    if mesh.cp > 1 and isinstance(sequence, int) and sequence % whole:
        yield (
            f"mesh.cp={mesh.cp}: data.sequence={sequence} is not divisible by 2 x cp = {whole}. Type "
            f"data.sequence={_up(sequence, whole)}."
        )


def _optimizer(config: Config, part: Mapping[str, Any]) -> Iterable[str]:
    if about(config.optim).get("needs") == "matrices" and about(part).get("matrices") is False:
        yield (
            f"optim={config.choices['optim']}: model={config.choices['model']} has no hidden matrix. Type optim=adamw."
        )


def _remat(config: Config, mesh: MeshShape, shape: PipelineShape) -> Iterable[str]:
    """Problems of remat with cp, ep and pp.

    Selective remat keeps results inside a block, which experts and split sequences overwrite in place. A schedule that
    splits the backward pass runs a block's backward once for its inputs and once for each group of its weights: torch
    recomputes the block each time and keeps all results, and refuses remat=selective (torch/utils/checkpoint.py of
    torch 2.13).
    """
    word, keeps = config.choices["remat"], fact(config.remat, "keeps")
    for axis in ("cp", "ep"):
        if getattr(mesh, axis) > 1 and keeps == "products":
            yield (
                f"remat={word} keeps results inside a block, which mesh.{axis}={getattr(mesh, axis)} overwrites. "
                "Type remat=full."
            )
    if mesh.pp > 1 and fact(shape.order, "splits_backward") and keeps != "all":
        yield (
            f"remat={word}: pipeline.schedule={shape.schedule} splits the backward pass and would keep more "
            "activations with remat than without. Type remat=none, or pipeline.schedule=interleaved_1f1b."
        )


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
