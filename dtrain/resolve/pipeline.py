"""The schedule of a pipeline: how many stages a rank holds, where they are, and what the schedule needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import Config
from dtrain.errors import WordsError
from dtrain.planned import PipelineShape


@dataclass(frozen=True)
class Schedule:
    """`stages` on each rank (the user may ask for more where `more`), `least` microbatches for a pipeline of pp ranks;
    `halves`: a backward runs in two.
    """

    stages: int
    layout: str
    least: Callable[[int], int]
    more: bool = False
    halves: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule(1, "loop", lambda pp: 1),
    "1f1b": Schedule(1, "loop", lambda pp: pp),
    "interleaved_1f1b": Schedule(2, "loop", lambda pp: 1, more=True),
    "looped_bfs": Schedule(2, "loop", lambda pp: 1, more=True),
    "interleaved_zero_bubble": Schedule(2, "loop", lambda pp: 1, more=True, halves=True),
    "zbv": Schedule(2, "v", lambda pp: 1, halves=True),
    "dualpipev": Schedule(2, "v", lambda pp: 2 * pp, halves=True),
}


def shape(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Decided also where there is one stage, so that a recipe's wishes are judged on every mesh."""
    asked, pp = config.pipeline, draft["mesh"].pp
    word = str(asked.schedule)
    schedule, stages, split = (
        SCHEDULES[word],
        SCHEDULES[word].stages if asked.stages is None else asked.stages,
        asked.split,
    )
    problems = []
    if asked.stages is not None and stages != schedule.stages and not schedule.more:
        problems.append(
            f"pipeline.stages={asked.stages}: {word} has {schedule.stages} stage(s) on each rank. Leave it out."
        )
    if not isinstance(split, str) and len(split) != pp * stages:
        problems.append(
            f"pipeline.split={list(split)}: {pp} rank(s) x {stages} stage(s) = {pp * stages} numbers are needed."
        )
    said = [
        f"pipeline.{key}"
        for key in ("schedule", "stages", "split")
        if config.sources.get(f"pipeline.{key}") == "command line"
    ]
    if pp == 1 and said:
        problems.append(f"{said[0]}: the mesh has one stage, mesh.pp=1. Type mesh.pp=2, or leave {said[0]} out.")
    if problems:
        raise WordsError(*problems)
    return {"pipeline": PipelineShape(word, stages, schedule.layout, split if isinstance(split, str) else tuple(split))}


def check_microbatches(word: str, count: int, pp: int) -> str | None:
    """The problem with `count` microbatches, if any."""
    least = SCHEDULES[word].least(pp)
    if count < least:
        return (
            f"pipeline.schedule={word} over mesh.pp={pp} needs at least {least} microbatches per step, here are "
            f"{count}. Type accumulate={least}."
        )
    rounds = max(1, count // pp)
    if SCHEDULES[word].more and word != "looped_bfs" and count % rounds:
        return (
            f"pipeline.schedule={word} runs whole rounds of mesh.pp={pp} microbatches, {count} are not. Type "
            f"accumulate={count // pp * pp}."
        )
    return None
