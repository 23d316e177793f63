"""Collectives that were predicted, held against those that a run is seen to make: the rows of the table in tests/bench/history.md."""

from collections import defaultdict
from typing import Any

from counting import Seen, count
from invariance import layouts
from predict import foreign
from small import plan

from dtrain.planned import Plan
from dtrain.predict.collectives import collectives
from dtrain.predict.view import groups
from dtrain.tracing import shapes_of

COMMON = "batch=8 logger=[] hook=[] steps=3 log.every=3 evaluate.every=0 evaluate.samples=8 checkpoint.every=0"
MODELS = layouts.MODELS | foreign.MODELS
Totals = dict[tuple[str, tuple[int, ...]], tuple[int, float]]
"""(kind, ranks) -> (calls, bytes)."""


def hold(model: str, words: str) -> tuple[list[Totals], list[Totals]]:
    """(predicted, seen) in a step, of the first rank of each stage of the pipeline."""
    asked = plan(*MODELS[model].split(), *COMMON.split(), *words.split())
    counted, stages = count(asked), range(asked.mesh.pp)
    return [predicted(asked, stage, ("step", "data")) for stage in stages], [
        seen(asked, stage, counted, ("step", "counts", "guard")) for stage in stages
    ]


def predicted(asked: Plan, stage: int, when: tuple[str, ...]) -> Totals:
    totals: dict[Any, list[float]] = defaultdict(lambda: [0, 0])
    first, among = stage * asked.mesh.batch * asked.mesh.tp, groups(asked)
    for call in collectives(asked, shapes_of(asked), stage):
        if call.when in when:
            group = among[call.axis]
            begin = 0 if call.axis in ("world", "pp") else first
            entry = totals[call.kind, tuple(range(begin, begin + group.size * group.stride, group.stride))]
            entry[0] += call.calls
            entry[1] += call.bytes
    return {key: (int(calls), bytes_) for key, (calls, bytes_) in totals.items()}


def seen(asked: Plan, stage: int, counted: list[dict[Seen, list[int]]], parts: tuple[str, ...]) -> Totals:
    """What experts exchange is the mean over the ranks of the exchange: rows go where the data wants them."""
    totals: dict[Any, list[float]] = defaultdict(lambda: [0, 0])
    rank = stage * asked.mesh.batch * asked.mesh.tp
    for key, (calls, bytes_) in counted[rank].items():
        if key.part in parts:
            if (
                key.kind == "all_to_all"
                and asked.mesh.ep > 1
                and key.ranks == tuple(range(rank, rank + asked.mesh.ep * asked.mesh.tp, asked.mesh.tp))
            ):
                bytes_ = sum(counted[other].get(key, [0, 0])[1] for other in key.ranks) / len(key.ranks)
            totals[key.kind, key.ranks][0] += calls
            totals[key.kind, key.ranks][1] += bytes_
    return {key: (int(calls), bytes_) for key, (calls, bytes_) in totals.items()}
