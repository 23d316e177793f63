"""The search of strategy=auto beside one that predicts every layout."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from small import composed

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.planned import Plan
from dtrain.predict.bounds import Bounds, Point
from dtrain.predict.prediction import predict
from dtrain.predict.state_bytes import holding_of
from dtrain.resolve import resolve
from dtrain.resolve.search import SIMPLER, Search
from dtrain.tracing import shapes_of

HERE = Cluster(gpus=0, cpus=4)
B1 = "cluster=h100x8 data=synthetic data.sequence=4096 model.layers=16 model.width=2048 model.heads=16 batch=64"
B8 = "cluster=h100x8 nodes=2 data=synthetic data.sequence=8192 model.layers=32 model.width=4096 model.heads=32 model.hidden=14336 batch=64"
B70 = "cluster=a100x8 nodes=8 data=synthetic data.sequence=4096 model.layers=80 model.width=8192 model.heads=64 model.hidden=28672 batch=128"
B405 = "cluster=h100x8 data=synthetic data.sequence=8192 model.layers=126 model.width=16384 model.heads=128 model.hidden=53248"
MOE = "cluster=h100x8 nodes=2 data=synthetic data.sequence=4096 model=moe model.layers=16 model.width=2048 model.heads=16 model.experts=16 batch=64"


def planned(words: str) -> Plan:
    return resolve(composed(*words.split()), HERE)


def found(monkeypatch: pytest.MonkeyPatch, words: str) -> Search:
    """The search that planning these words makes."""
    searches = []
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda search: (searches.append(search), run(search))[1])
    planned(words)
    return searches[-1]


def point_of(plan: Plan) -> Point:
    options, data = (plan.remat["_target_"], *plan.tensor.values()), (repr(plan.strategy),)
    batch = plan.batch
    return Point(
        plan.mesh, batch.microbatch, batch.accumulate, plan.pipeline, holding_of(plan), options, data, lambda: plan
    )


LAYOUTS = [
    f"strategy={strategy} mesh.tp={tp} mesh.pp={pp} remat={remat} microbatch={micro}"
    for strategy, tp, pp, remat, micro in itertools.product(
        ("ddp", "zero1", "zero2", "fsdp"), (1, 2), (1, 4), ("none", "selective", "full"), (1, 2)
    )
]


@pytest.mark.parametrize("model", [B8, MOE])
def test_no_layout_takes_less_time_or_memory_than_its_bounds(model: str) -> None:
    for words in LAYOUTS:
        plan = planned(f"{model} {words}")
        shapes = shapes_of(plan)
        prediction = predict(plan, shapes)
        bounds = Bounds(build(plan.cluster), shapes)
        assert prediction.time
        assert bounds.seconds(point_of(plan)) <= 1.001 * prediction.time.seconds, words
        assert bounds.memory(point_of(plan)) <= prediction.memory.peak, words


def every(search: Search) -> Iterator[tuple[float, Any]]:
    """Seconds of every layout that fits, found without bounds."""
    search.most, search.keep = 10**6, 10**6
    search._best.clear()
    for layout in search.run().layouts:
        yield layout.seconds, layout.words


@pytest.mark.parametrize(
    "words",
    [
        B1,
        f"{B1} mesh.tp=2 remat=full",
        f"{B8} microbatch=1",
        *(pytest.param(words, marks=pytest.mark.slow) for words in (B8, MOE)),
    ],
)
def test_no_layout_is_much_faster_than_the_chosen_one(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    search = found(monkeypatch, words)
    chosen = search.found.layouts[0].seconds
    assert chosen <= SIMPLER * 1.001 * min(seconds for seconds, _ in every(search))


@pytest.mark.parametrize("words", [B1, f"{B8} microbatch=1 remat=none", f"{B70} mesh.tp=8"])
def test_layouts_that_are_left_out_would_not_have_been_chosen(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    chosen = found(monkeypatch, words).found
    monkeypatch.setattr(Search, "_wins", lambda *_: True)
    every = found(monkeypatch, words).found
    assert chosen.predicted < every.predicted
    assert chosen.layouts[0].words == every.layouts[0].words


@pytest.mark.parametrize(
    "words", [B70, f"{B405} nodes=64 batch=256", f"{B405} nodes=2048 batch=2048"], ids=["70B", "405B", "405B on 16,384"]
)
def test_large_models_get_a_layout_that_fits(words: str) -> None:
    plan = planned(words)
    assert predict(plan, shapes_of(plan)).fits


@pytest.mark.parametrize("words", ["data=synthetic", "data=synthetic devices=2", f"{B1} nodes=7 devices=7 batch=49"])
def test_what_fits_is_not_recomputed(words: str) -> None:
    assert planned(words).remat["_target_"] == "dtrain.remat.none.build"


def test_words_of_the_user_stay() -> None:
    plan = planned(f"{B8} mesh.tp=4 remat=full microbatch=2 tensor.sequence=split")
    assert (plan.mesh.tp, plan.remat["_target_"], plan.batch.microbatch) == (4, "dtrain.remat.full.build", 2)
    assert plan.tensor["sequence"] == "split"
    assert plan.tensor["loss"] == "whole"


def test_what_is_chosen_does_not_change_the_place_of_the_run() -> None:
    """The same words go on with the same run, whatever cluster it runs on."""
    places = {planned(f"{B1} cluster={word} nodes={nodes}").out for word, nodes in (("h100x8", 1), ("a100x8", 1))}
    assert len(places) == 1
