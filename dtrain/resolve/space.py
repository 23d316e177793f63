"""Every layout that the words of a run leave open, as the words that would have to be typed.

Degrees of the mesh, strategy, microbatch, remat, the sequence and loss under tp, the schedule of a pipeline, and when
gradients are reduced: none of them changes what is computed.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dtrain.config import files
from dtrain.config.facts import Part, about, fact
from dtrain.config.schema import GROUPS, NAMED, Config
from dtrain.planned import MeshShape
from dtrain.predict.shapes import Shapes
from dtrain.resolve.mesh import divisors

Words = Mapping[str, Any]
"""Key -> value."""
WHOLE: Words = {}
SPLITS: tuple[Words, ...] = ({"tensor.sequence": "split", "tensor.loss": "split"}, {"tensor.loss": "split"})
SHORTEST = 2048
"""Tokens of a part of a sequence below which a search splits it no further."""
MICROBATCHES = 8
"""Number of sizes of a microbatch above which only the largest below each power of two is tried."""


def applied(config: Config, words: Words) -> Config:
    """The config as if these words had been typed as well."""
    choices, options, changed = dict(config.choices), dict(config.options), dict[str, Any]()
    for key, value in words.items():
        name, _, argument = key.partition(".")
        before = changed.get(name, getattr(config, name))
        if name in GROUPS and not argument:
            choices[name], changed[name] = value, part_of(config, name, value)
        elif not argument:
            changed[name] = value
        else:
            changed[name] = (
                {**before, argument: value} if isinstance(before, dict) else replace(before, **{argument: value})
            )
        if key in NAMED:
            options[NAMED[key]] = {value: files.node(NAMED[key], value)}
    return replace(config, choices=choices, options=options, **changed)


def part_of(config: Config, group: str, word: str) -> Part:
    """The arguments of a word, as they are typed if it is the chosen one."""
    if config.choices[group] == word:
        return dict(getattr(config, group))
    return config.options.get(group, {}).get(word) or files.node(group, word)


def is_free(config: Config, *keys: str) -> bool:
    """Whether no word says anything about these keys."""
    return not any(source == key or source.startswith(f"{key}.") for source in config.sources for key in keys)


def tried(group: str) -> list[str]:
    """The words of a group that a search may choose: those with the fact `try`."""
    return [word for word in files.groups()[group] if about(files.node(group, word)).get("try")]


def meshes(
    config: Config, strategies: Sequence[str], nodes: int, devices: int, shapes: Shapes, *, whole: bool = False
) -> Iterator[Words]:
    """Every strategy with degrees that may make up the number of ranks; `whole`: without those that split the model,
    unless they are typed.
    """
    asked, ranks = config.mesh, nodes * devices
    splits, attends = (any(getattr(block, name) for block in shapes.blocks) for name in ("splits", "attention"))
    experts = next((one.count for block in shapes.blocks for one in block.experts), 1)
    open_ = not (config.microbatch and config.accumulate)  # else the batch depends on the data axes
    longest = max(1, shapes.tokens // SHORTEST) if attends else 1
    axes = {
        "pp": [pp for pp in divisors(ranks) if pp <= (max(1, shapes.listed) if open_ else 1)],
        "cp": [cp for cp in divisors(ranks) if cp <= (longest if open_ else 1)],
        "tp": divisors(devices) if splits and open_ else [1],
        "ep": divisors(experts),
    }
    free = {axis: [1] if whole else degrees for axis, degrees in axes.items() if getattr(asked, axis) is None}
    for degrees in itertools.product(*free.values()):
        mesh = {axis: getattr(asked, axis) or 1 for axis in axes} | dict(zip(free, degrees, strict=True))
        data, left = divmod(ranks, mesh["pp"] * mesh["cp"] * mesh["tp"])
        if left or data * mesh["cp"] % mesh["ep"]:
            continue
        words = {f"mesh.{axis}": mesh[axis] for axis in free if mesh[axis] > 1}
        for strategy in _distinct(config, strategies, mesh["pp"]):
            for replicas in _replicas(config, strategy, data, nodes, devices // (mesh["cp"] * mesh["tp"])):
                yield {"strategy": strategy, **words, **({"mesh.dp_replicate": replicas} if replicas > 1 else {})}


def _distinct(config: Config, strategies: Sequence[str], pp: int) -> Iterator[str]:
    """Strategies of which no two hold the same: in a pipeline, all that shard gather weights and reduce gradients once
    for a step.
    """
    kinds = set[Any]()
    for strategy in strategies:
        kind = fact(part_of(config, "strategy", strategy), "holds") if pp > 1 else strategy
        if kind not in kinds:
            kinds.add(kind)
            yield strategy


def _replicas(config: Config, strategy: str, data: int, nodes: int, inside: int) -> list[int]:
    """Numbers of replicas that a strategy which shards may be told: none, and those whose shards fill whole nodes;
    `inside`: data ranks of a node.
    """
    fills = about(part_of(config, "strategy", strategy)).get("fill")
    if fills != "dp_shard" or nodes == 1 or config.mesh.dp_replicate or config.mesh.dp_shard:
        return [1]
    sizes = itertools.takewhile(lambda size: size < data, (max(1, inside) << power for power in itertools.count()))
    return [1, *(data // size for size in sizes if size > 1 and data % size == 0)]


def details(config: Config, words: Words, mesh: MeshShape, blocks: int) -> Iterator[Words]:
    """`words` with every choice that this mesh leaves open to a model of so many blocks."""
    part = part_of(config, "strategy", words["strategy"])
    schedules = _schedules(config, blocks // mesh.pp) if mesh.pp > 1 and is_free(config, "pipeline") else [None]
    remats = _others("remat", config.choices["remat"]) if blocks and is_free(config, "remat") else [None]
    whole = [word for word in schedules if not word or not fact(files.node("pipeline", word), "splits_backward")]
    for micro in _microbatches(config, mesh):
        several = mesh.pp == 1 and (config.accumulate or 1) * (micro or 1) * mesh.data < config.batch
        reduces = ["last", "every"] if several and part.get("reduce") == "auto" else [None]
        for schedule, remat, tensor, reduce in itertools.product(schedules, remats, tensors(config, mesh), reduces):
            if remat and schedule not in whole:
                continue  # model_axes refuses it
            chosen = {
                "microbatch": micro, "pipeline.schedule": schedule, "remat": remat, "strategy.reduce": reduce, **tensor,
            }  # fmt: skip
            yield {**words, **{key: value for key, value in chosen.items() if value is not None}}


def _schedules(config: Config, most: int) -> list[str | None]:
    """Schedules that give a rank at most so many stages."""
    now = config.pipeline.schedule
    return [word for word in _others("pipeline", now) if fact(files.node("pipeline", word or now), "stages") <= most]


def _others(group: str, now: str) -> list[str | None]:
    """None for the present word, and the others that a search may choose."""
    return [None, *(word for word in tried(group) if word != now)]


def tensors(config: Config, mesh: MeshShape) -> Sequence[Words]:
    """Choices of splitting the sequence and the loss as well under tensor parallelism."""
    known = about(config.model).get("sequence") is True
    return [WHOLE, *SPLITS[: 1 if known else 2]] if mesh.tp > 1 and is_free(config, "tensor") else [WHOLE]


def _microbatches(config: Config, mesh: MeshShape) -> Sequence[int | None]:
    """Every divisor of the samples of a rank, or, if there are many, the largest below each power of two."""
    if config.microbatch or config.accumulate or config.objective.get("together"):
        return [None]
    local, left = divmod(config.batch, mesh.data)
    if left:
        return []
    sizes = divisors(local)
    return sizes if len(sizes) <= MICROBATCHES else list({size.bit_length(): size for size in sizes}.values())
