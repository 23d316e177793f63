"""Sizes that a mesh splits must divide: heads and widths by tp, blocks by pp, experts by ep, the sequence by cp.

A model's word says in `_about_` which of its arguments those are. A model of the user's own says nothing here but for
the sequence, which the data has.
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
"""How an axis is used: key -> what is allowed."""


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


def rows(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Padded rows: what needs one length all through the run, and what it divides."""
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
            f"data.length={length} does not divide by {whole}, into which mesh.cp and mesh.tp cut a row. Type "
            f"data.length={_up(length, whole)}."
        )
    inputs = data.get("inputs")
    if mesh.cp > 1 and pad is not None and isinstance(inputs, list | tuple) and "attention_mask" in inputs:
        problems.append(
            f"mesh.cp={mesh.cp}: attention_mask of data.inputs hides tokens, which a part of a sequence cannot. Leave "
            "it out for a causal model, "
            "which never looks at the padding behind a row, or leave mesh.cp out."
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
    shared = (
        part.get("shared"),
        part.get("hidden"),
    )  # experts that see every token are one feed-forward of their widths together
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
                f"tensor.sequence=split: data.sequence={sequence} does not divide by cp x tp = {whole}. Type "
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
            f"mesh.cp={mesh.cp}: data.sequence={sequence} does not divide by 2 x cp = {whole}. Type "
            f"data.sequence={_up(sequence, whole)}."
        )


def _optimizer(config: Config, part: Mapping[str, Any]) -> Iterable[str]:
    if about(config.optim).get("needs") == "matrices" and about(part).get("matrices") is False:
        yield (
            f"optim={config.choices['optim']}: model={config.choices['model']} has no hidden matrix. Type optim=adamw."
        )


def _remat(config: Config, mesh: MeshShape, shape: PipelineShape) -> Iterable[str]:
    """In-place results of experts and split sequences cannot be kept for a second pass through a
    block.

    A backward in halves goes through a block once for its inputs and once for each group of its weights: torch computes
    the block again every time, keeps it all, and with remat=selective refuses (torch/utils/checkpoint.py of torch
    2.13).
    """
    word, keeps = config.choices["remat"], fact(config.remat, "keeps")
    for axis in ("cp", "ep"):
        if getattr(mesh, axis) > 1 and keeps == "products":
            yield (
                f"remat={word} keeps results inside a block, which mesh.{axis}={getattr(mesh, axis)} changes there. "
                "Type remat=full."
            )
    if mesh.pp > 1 and fact(shape.order, "splits_backward") and keeps != "all":
        yield (
            f"remat={word}: pipeline.schedule={shape.schedule} goes backward in halves and would keep more with it "
            "than without. Type remat=none, or pipeline.schedule=interleaved_1f1b."
        )


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
