"""Decides the pipeline schedule, the stages per rank and their placement, and checks what the schedule needs."""

from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about, fact
from dtrain.config.schema import Config
from dtrain.config.word import typed_at
from dtrain.errors import WordsError
from dtrain.planned import PipelineShape


def shape(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Decide the shape even for one stage, so that the words of a recipe are validated on every mesh; but numbers of
    blocks for several stages, of a recipe or a run, say nothing about one.
    """
    asked, pp = config.pipeline, draft["mesh"].pp
    word, split = str(asked.schedule), "blocks" if pp == 1 and not isinstance(asked.split, str) else asked.split
    order = config.options["pipeline"][word]
    facts = about(order)
    missing = [name for name in ("stages", "layout") if facts.get(name) is None]
    if missing:
        raise WordsError(
            f"pipeline.schedule={word}: {order['_target_']} does not state {', '.join(missing)}. Give its class facts "
            "such as about = {'stages': 1, 'layout': 'loop'}."
        )
    stages = facts["stages"] if asked.stages is None else asked.stages
    problems = []
    if stages != facts["stages"] and not facts.get("more"):
        problems.append(
            f"pipeline.stages={asked.stages}: {word} has {facts['stages']} stage(s) on each rank. Leave it out."
        )
    if not isinstance(split, str) and len(split) != pp * stages:
        problems.append(
            f"pipeline.split={list(split)}: {pp} rank(s) x {stages} stage(s) = {pp * stages} numbers are needed. "
            "Type pipeline.split=blocks for equal ones."
        )
    keys = [f"pipeline.{name}" for name in ("schedule", "stages", "split")]
    typed = [key for key in keys if config.sources.get(key) == typed_at()]
    if pp == 1 and typed:
        problems.append(f"{typed[0]}: the mesh has one stage, mesh.pp=1. Type mesh.pp=2, or leave {typed[0]} out.")
    if problems:
        raise WordsError(*problems)
    split = split if isinstance(split, str) else tuple(split)
    return {"pipeline": PipelineShape(word, stages, facts["layout"], split, order)}


def least(shape: PipelineShape, pp: int) -> int:
    """The minimum number of microbatches of a schedule."""
    return max(1, int(fact(shape.order, "least", 0)) * pp)


def check_microbatches(shape: PipelineShape, count: int, pp: int) -> str | None:
    """The problem with `count` microbatches, if any."""
    if count < least(shape, pp):
        return (
            f"pipeline.schedule={shape.schedule} over mesh.pp={pp} needs at least {least(shape, pp)} microbatches per "
            f"step, here are {count}. Type accumulate={least(shape, pp)}."
        )
    if fact(shape.order, "rounds") and count % max(1, count // pp):
        return (
            f"pipeline.schedule={shape.schedule} runs rounds of mesh.pp={pp} microbatches, which {count} do not fill. "
            f"Type accumulate={count // pp * pp}."
        )
    return None
