"""Words that would make a plan fit: each one, typed, does."""

import json
import random
import re
from collections.abc import Iterator
from functools import cache

import pytest
from resolve.test_pairs import SIZES
from small import plan as planned

from dtrain.cluster import Cluster
from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.predict.advice import MOST, Change, advise
from dtrain.predict.prediction import Prediction, predict
from dtrain.predict.report import advice, duration, size, warning
from dtrain.tracing import shapes_of
from dtrain.verb import plan

B8 = (
    "model.vocab=128256 data=synthetic data.vocab=128256 data.sequence=8192 model.layers=32 model.width=4096 model.heads=32 model.kv_heads=8 "
    "model.hidden=14336 cluster=h100x8"
)


@cache
def tried(words: str) -> tuple[Plan, Prediction, list[Change]]:
    def attempt(more: tuple[str, ...] = ()) -> tuple[Plan, Prediction]:
        plan = planned(*words.split(), *more, on=Cluster(gpus=0, cpus=4))
        return plan, predict(plan, shapes_of(plan))

    plan, prediction = attempt()
    return plan, prediction, advise(plan, attempt)


def test_changes_are_words_with_which_it_fits_the_cheapest_first() -> None:
    plan, prediction, changes = tried(f"{B8} strategy=fsdp batch=64 microbatch=8 precision=bf16")
    assert not prediction.fits
    assert len(changes) == MOST
    assert all(change.prediction.fits and change.plan != plan for change in changes)
    assert [change.cost for change in changes] == sorted(change.cost for change in changes)
    rows = [text for name, text in advice(changes, plan) if name == "try"]
    assert all(row.endswith(" ".join(change.words)) for row, change in zip(rows, changes, strict=True))


def test_two_changes_together_where_one_is_too_little() -> None:
    """Eight billion weights and their optimizer on every rank, and activations of whole sequences: neither goes away alone."""
    _, _, changes = tried(f"{B8} strategy=ddp batch=64 microbatch=8")
    assert len(changes) == MOST
    assert all(len(change.words) > 1 and change.prediction.fits for change in changes)
    kinds = [{word.partition("=")[0] for word in change.words} for change in changes]
    assert not any(one < other for one in kinds for other in kinds), "more of what is enough already is no advice"


def test_each_change_is_of_another_kind() -> None:
    _, _, changes = tried(f"{B8} strategy=fsdp batch=64 microbatch=8 precision=bf16")
    assert len({tuple(word.partition("=")[0] for word in change.words) for change in changes}) == len(changes)


def test_devices_that_nobody_uses_are_the_first_thing_to_type() -> None:
    _, _, changes = tried(f"{B8} devices=1 batch=8 precision=bf16")
    assert changes[0].words in [("devices=4",), ("devices=8",)]


def test_a_pipeline_that_is_too_long_is_made_shorter() -> None:
    words = (
        B8.replace("layers=32", "layers=128")
        .replace("width=4096", "width=16384")
        .replace("heads=32", "heads=128")
        .replace("hidden=14336", "hidden=53248")
    )
    _, _, changes = tried(
        f"{words} nodes=256 strategy=fsdp batch=2048 mesh.tp=8 mesh.pp=16 tensor.sequence=split precision=bf16 remat=full"
    )
    assert any("mesh.pp=8" in change.words for change in changes)


def test_where_nothing_helps_it_is_said() -> None:
    plan, _, changes = tried(
        "cluster=h100x8 data=synthetic data.sequence=64 batch=8 strategy=ddp model.width=131072 model.heads=1024 model.layers=8"
    )
    assert changes == []
    assert "none of the changes" in next(iter(advice(changes, plan)))[1]


def test_the_warning_before_a_run_is_one_line() -> None:
    _, prediction, _ = tried(f"{B8} strategy=ddp batch=8")
    assert "\n" not in warning(prediction)
    assert "dtrain plan" in warning(prediction)


def too_large(seed: int) -> Iterator[str]:
    """Words of runs that rules take; most of them do not fit."""
    pick = random.Random(seed).choice
    while True:
        words = f"precision={pick(['auto', 'bf16', 'fp32'])} data=synthetic {SIZES[pick(['1B', '8B', '13B', '34B', '70B', 'moe 47B', 'moe 7B'])]}"
        words += f" cluster={pick(['h100x8', 'a100x8', 'l40sx8', 'b200x8'])} nodes={pick([1, 2, 3, 4])} devices={pick([1, 2, 4, 6, 8])}"
        words += f" strategy={pick(['single', 'ddp', 'fsdp', 'zero1', 'zero2', 'zero3', 'hsdp', 'pipeline'])} batch={pick([8, 12, 24, 48, 96])}"
        words += pick(["", "", " mesh.tp=2", " mesh.tp=4", " mesh.pp=2", " mesh.pp=3", " microbatch=1", " remat=full"])
        try:
            planned(*words.split(), on=Cluster(gpus=0, cpus=4))
        except WordsError:
            continue
        yield words


LARGE = [
    f"{SIZES[model]} data.sequence={sequence} batch=64 {cluster} {layout}"
    for model in ("8B", "34B", "70B")
    for sequence in (4096, 32768)
    for cluster in ("cluster=h100x8 devices=4", "cluster=a100x8 nodes=2", "cluster=h100x8 nodes=4")
    for layout in ("strategy=fsdp", "strategy=ddp")
]


@pytest.mark.campaign("fuzz")
@pytest.mark.parametrize("words", LARGE)
def test_what_a_plan_says_to_try_is_as_fast_as_the_best_layout(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run(["json", "data=synthetic", *words.split()]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert plan.run(["best", "json", "data=synthetic", *words.split()]) == 0
    layouts = json.loads(capsys.readouterr().out)
    if shown["prediction"]["fits"] or not layouts:
        return
    best = layouts[0]["time"]["seconds"]
    seconds = [change["prediction"]["time"]["seconds"] for change in shown["changes"]]
    more = [any(word.startswith(("nodes=", "devices=")) for word in change["words"]) for change in shown["changes"]]
    here = [second for second, other in zip(seconds, more, strict=True) if not other]
    assert min(here) <= 1.05 * best, shown["changes"]
    assert not more[0] or seconds[0] < here[0], "what takes more ranks comes first only if it costs less"


@pytest.mark.campaign("fuzz")
@pytest.mark.parametrize("seed", range(20))
def test_what_a_plan_says_to_try_is_as_good_as_it_says(seed: int) -> None:
    given, looked = too_large(seed), 0
    while looked < 3:
        words = next(given)
        plan, prediction, changes = tried(words)
        if prediction.fits or not changes:
            continue
        looked += 1
        for _, row in advice(changes, plan):
            typed = re.search(r"(?: [\w.]+=\S+)+$", row)
            assert typed
            better = planned(*words.split(), *typed[0].split(), on=Cluster(gpus=0, cpus=4))
            said = predict(better, shapes_of(better))
            assert said.fits and said.time
            assert better.devices <= better.cluster["gpus"], row
            assert size(said.memory.peak) in row and duration(said.time.seconds) in row
            assert better.world == plan.world or f"on {better.world} ranks" in row
