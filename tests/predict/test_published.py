"""Predictions beside published runs of torchtitan, LLM-foundry, Megatron-LM, NeMo, llm.c and papers, written as words: published.jsonl."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from small import composed

from dtrain.cluster import Cluster
from dtrain.planned import Plan
from dtrain.predict.band import BANDS, kind_of
from dtrain.predict.prediction import Prediction, predict
from dtrain.resolve import resolve
from dtrain.tracing import shapes_of

MANY = 5
"""Runs from which a category counts by itself."""


class Row(NamedTuple):
    published: dict[str, Any]
    plan: Plan
    prediction: Prediction
    speed: float | None
    """Predicted tokens per second divided by the published ones; None if a row tells of memory alone."""


@cache
def rows() -> list[Row]:
    return list(_rows())


def _rows() -> Iterator[Row]:
    for line in Path(__file__).with_name("published.jsonl").read_text().splitlines():
        published = json.loads(line)
        plan = resolve(composed(*published["words"].split()), Cluster(gpus=0, cpus=4))
        shapes = shapes_of(plan)
        assert not shapes.unknown
        prediction = predict(plan, shapes)
        assert prediction.time
        figures, speed = published["published"], None
        if figures.get("tps"):
            speed = prediction.time.tokens_per_second / plan.world / figures["tps"]
        elif figures.get("mfu"):
            speed = prediction.time.mfu / figures["mfu"]
        yield Row(published, plan, prediction, speed)


def spread(ratios: list[float]) -> float:
    return math.sqrt(sum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios))


def test_the_speed_of_published_runs_is_met() -> None:
    every = [row.speed for row in rows() if row.speed]
    assert len(every) > 100
    assert 0.95 < median(every) < 1.1
    assert spread(every) < 0.2


def test_the_speed_of_each_kind_of_published_run_is_met() -> None:
    kinds = defaultdict[str, list[float]](list)
    for row in rows():
        if row.speed:
            kinds[row.published["category"]].append(row.speed)
    spreads = {kind: spread(each) for kind, each in kinds.items() if len(each) >= MANY}
    assert max(spreads.values()) < 0.3, spreads


def test_most_published_runs_are_within_the_range_that_is_told() -> None:
    inside = [
        lowest < row.speed < highest
        for row in rows()
        if row.speed
        for lowest, highest in [BANDS[kind_of(row.plan, row.prediction.shapes)]]
    ]
    assert sum(inside) > 0.8 * len(inside)


def test_no_gpu_is_promised_more_than_it_can_do() -> None:
    assert max(row.prediction.time.mfu for row in rows() if row.prediction.time) < 0.8


def test_what_ran_is_predicted_to_fit() -> None:
    ran = [row for row in rows() if row.published["published"].get("fits", True)]
    tight = [row.published["id"] for row in ran if not row.prediction.fits]
    assert len(tight) <= 0.05 * len(ran), tight


def test_what_ran_out_of_memory_is_predicted_not_to_fit() -> None:
    failed = [row for row in rows() if not row.published["published"].get("fits", True)]
    assert len(failed) > 3
    assert [row.published["id"] for row in failed if row.prediction.fits] == []


def test_a_loss_over_chunks_of_logits_fits_where_one_over_whole_logits_did_not() -> None:
    row = next(row for row in rows() if row.published["id"] == "tt-8B-80GB-b2-eager")
    words = [word for word in row.published["words"].split() if not word.startswith(("objective", "trust"))]
    plan = resolve(composed(*words), Cluster(gpus=0, cpus=4))
    assert predict(plan, shapes_of(plan)).fits and not row.prediction.fits
