"""Sizes that a mesh splits must divide: heads and widths by tp, blocks by pp, experts by ep, the sequence by cp.

The `_about_` of a model's word names those arguments. For a user's own model only the sequence is checked, which the
data states.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about, fact
from dtrain.config.schema import Config, default
from dtrain.config.word import typed_at
from dtrain.errors import WordsError
from dtrain.planned import MeshShape, PipelineShape
from dtrain.resolve.mesh import nearest_divisors, undivided

AXIS_OF = {"tensor": "tp", "context": "cp"}
"""Group of the keys that set how an axis is used -> the axis."""


def model(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check every axis that splits this model."""
    mesh, word = draft["mesh"], config.choices["model"]
    yield from _optimizer(config)
    yield from _remat(config, mesh, draft["pipeline"])
    if word:
        yield from _tensor(config, mesh)
        yield from _pipeline(config, mesh, draft["pipeline"].stages)
        yield from _experts(config, mesh)
        yield from _context(config, mesh)
    elif about(config.data).get("gives") == "tokens" or config.choices["objective"] == "next_token":
        yield from _sequence(config, mesh)


def options(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Decide how tp and cp are used. An option typed for an axis of one rank is refused, as nothing reads it."""
    mesh, problems = draft["mesh"], list[str]()
    chosen = {group: dict(vars(getattr(config, group))) for group in AXIS_OF}
    for group, axis in AXIS_OF.items():
        for name, value in chosen[group].items():
            key, idle = f"{group}.{name}", getattr(mesh, axis) == 1
            if idle and config.sources.get(key) == typed_at() and value != default(key):
                problems.append(f"{key}={value}: the mesh has mesh.{axis}=1. Type mesh.{axis}=2, or leave {key} out.")
    if problems:
        raise WordsError(*problems)
    return chosen


def rows(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check padded rows: some layouts need rows of one fixed length, which the mesh must divide."""
    mesh, data = draft["mesh"], config.data
    yield from _bucketed(config)
    if data.get("packing") == "pack":
        yield from _packed(config)
        return
    if "pad" not in data and data.get("padding") != "longest":
        return
    pad, length = data.get("pad"), data.get("length")
    if "length" in data and data.get("sequence") is not None and data.get("tokenizer") is None:
        packed = "the window of packed rows, or " * ("packing" in data)
        yield (
            f"data.sequence={data['sequence']} is {packed}the most tokens of a row of text. Type "
            f"{'data.packing=pack as well, ' * bool(packed)}data.tokenizer=<a folder> for text, or "
            f"data.length={data['sequence']} to pad rows to that length."
        )
    split = config.tensor.sequence == "split" and mesh.tp > 1
    needs = {
        f"mesh.pp={mesh.pp}": mesh.pp > 1,
        f"mesh.cp={mesh.cp}": mesh.cp > 1,
        "tensor.sequence=split": split,
        "model.balance": "balance" in config.model,
    }
    why = next((name for name, needed in needs.items() if needed), None)
    if data.get("padding") == "longest" and why:
        yield f"data.padding=longest: {why} needs rows of one length in every batch. Type data.padding=sequence."
    if length is not None and pad is None:
        yield "data.length: rows are not padded. Type data.pad=<the padding token> as well, or leave data.length out."
    elif pad is not None and length is None and why:
        yield f"data.pad={pad}: {why} needs rows of one length in every batch. Type data.length=<the longest row>."
    whole = math.lcm(2 * mesh.cp if mesh.cp > 1 else 1, mesh.cp * mesh.tp if split else 1)
    if isinstance(length, int) and length % whole:
        yield (
            f"data.length={length} is not divisible by {whole}, into which mesh.cp and mesh.tp cut a row. Type "
            f"data.length={_up(length, whole)}."
        )
    inputs = data.get("inputs")
    if mesh.cp > 1 and pad is not None and isinstance(inputs, list | tuple) and "attention_mask" in inputs:
        yield (
            f"mesh.cp={mesh.cp}: attention_mask of data.inputs masks tokens, which does not work on a part of a "
            "sequence. Leave it out for a causal model, which never attends to the padding after a row, or leave "
            "mesh.cp out."
        )


def _bucketed(config: Config) -> Iterable[str]:
    """Refuse data.bucket where it would save no padding."""
    data = config.data
    for name, part in (data.get("of") or {}).items():
        if isinstance(part, Mapping) and part.get("bucket") is not None:
            yield f"data.of.{name}.bucket: the batches of a mixture have samples of all its sources. Leave it out."
    if data.get("bucket") is None:
        return
    key = f"data.bucket={data['bucket']}"
    if data.get("packing") == "pack":
        yield f"{key}: packed rows fill windows of one length. Leave data.bucket out, or type data.packing=none."
    elif "padding" in data and data["padding"] != "longest":
        yield f"{key}: all samples are padded to data.sequence. Type data.padding=longest as well."
    elif "pad" in data and data["pad"] is None:
        yield f"{key}: rows are not padded. Type data.pad=<the padding token> as well, or leave data.bucket out."
    elif data.get("length") is not None:
        yield f"{key}: all rows are padded to data.length={data['length']}. Leave one of them out."
    if config.batch == 1:
        yield f"{key}: a batch of one sample has no padding. Type a larger batch, or leave data.bucket out."


def _packed(config: Config) -> Iterable[str]:
    """Check packed rows against their window and the model."""
    data, takes = config.data, about(config.model).get("takes")
    if data.get("sequence") is None:
        yield "data.packing=pack: the window is not given. Type data.sequence=<tokens>, such as data.sequence=2048."
    if data.get("length") is not None:
        yield f"data.length={data['length']} is of padded rows; packed rows fill data.sequence. Leave data.length out."
    if data.get("transform") is not None:
        yield (
            "data.transform: rows are packed by the lengths that they have in their files, which it may change. Leave "
            "it out, or type data.packing=none."
        )
    for name, value in (("padding", "longest"), ("mask", True), ("kind", "pairs")):
        if data.get(name) == value:
            shown = str(value).lower()
            yield f"data.{name}={shown} does not go with data.packing=pack. Leave one of them out."
    if takes in ("image", "features"):
        yield (
            f"data.packing=pack: model={config.word('model')} takes no tokens, let alone where their documents end. "
            "Type model=gpt, or data.packing=none."
        )


def _states_all(part: Mapping[str, Any]) -> bool:
    """Whether a fact that is not stated does not hold: of dtrain's own models. The tables of others, also of those that
    are read from where their weights are, are known when the model is built.
    """
    return str(part.get("_target_")).startswith("dtrain.") and "weights_at" not in about(part)


def _tensor(config: Config, mesh: MeshShape) -> Iterable[str]:
    part, facts = config.model, about(config.model)
    if mesh.tp == 1:
        return
    if "tp" not in facts:
        if _states_all(part):
            yield (
                f"mesh.tp={mesh.tp}: model={config.word('model')} has no matrices that tensor parallelism could "
                "split. Leave mesh.tp out."
            )
        return
    sizes = {name: part[name] for name in facts["tp"] if isinstance(part.get(name), int)}
    yield from undivided(mesh, "model", sizes)
    # shared experts form one feed-forward layer of their combined width
    shared, hidden = part.get("shared"), part.get("hidden")
    if isinstance(shared, int) and isinstance(hidden, int) and shared * hidden % mesh.tp:
        yield (
            f"mesh.tp={mesh.tp} does not divide model.shared={shared} x model.hidden={hidden}. Type "
            f"model.hidden={_up(hidden, mesh.tp)}."
        )
    if config.tensor.sequence == "split":
        sequence, whole = config.data.get("sequence"), mesh.cp * mesh.tp
        if not facts.get("sequence"):
            yield f"tensor.sequence=split: model={config.word('model')} keeps its sequences whole. Leave it out."
        elif isinstance(sequence, int) and sequence % whole:
            yield (
                f"tensor.sequence=split: data.sequence={sequence} is not divisible by cp x tp = {whole}. Type "
                f"data.sequence={_up(sequence, whole)}."
            )


def _pipeline(config: Config, mesh: MeshShape, stages: int) -> Iterable[str]:
    part, facts, split = config.model, about(config.model), config.pipeline.split
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
        elif not isinstance(split, str) and sum(split) != blocks:
            yield f"pipeline.split={list(split)} is {sum(split)} blocks, but {names} = {blocks}."


def _experts(config: Config, mesh: MeshShape) -> Iterable[str]:
    experts = config.model.get("experts")
    if mesh.ep > 1 and "experts" not in config.model and _states_all(config.model):
        yield (f"mesh.ep={mesh.ep}: model={config.word('model')} has no experts. Type model=moe, or leave mesh.ep out.")
    elif isinstance(experts, int) and experts % mesh.ep:
        yield (
            f"mesh.ep={mesh.ep} does not divide model.experts={experts}. "
            f"{nearest_divisors('mesh.ep', mesh.ep, math.gcd(experts, mesh.batch))}"
        )


def _context(config: Config, mesh: MeshShape) -> Iterable[str]:
    if mesh.cp == 1:
        return
    takes = about(config.model).get("takes")
    if takes != "tokens" and (takes or _states_all(config.model)):
        yield f"mesh.cp={mesh.cp}: model={config.word('model')} has no sequence to split. Leave mesh.cp out."
        return
    yield from _sequence(config, mesh)
    heads = config.model.get("heads")
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


def _optimizer(config: Config) -> Iterable[str]:
    if about(config.optim).get("needs") == "matrices" and about(config.model).get("matrices") is False:
        yield (f"optim={config.word('optim')}: model={config.word('model')} has no hidden matrix. Type optim=adamw.")


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
