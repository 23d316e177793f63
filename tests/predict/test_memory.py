"""Memory of the fullest rank: the bytes that real steps hold, and no more work for more ranks."""

import sys
from dataclasses import replace
from typing import Any

import pytest
from metering import count
from pool import resident
from predicted import ALL, FOREIGN, PIPELINE, QUICK, Compared, compare, planned
from small import plan

from dtrain.cluster import Cluster, detect
from dtrain.config import files
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.memory import Memory, memory

LARGE = (
    "data=synthetic", "objective=next_token", "model.layers=80", "model.width=8192", "model.heads=64", "model.kv_heads=8", "model.hidden=28672",
    "data.vocab=128256", "data.sequence=8192", "precision=bf16", "remat=full",
)  # fmt: skip
SEEN = (
    "model=frozen strategy=fsdp devices=2", "model=knotted strategy=zero1 devices=2 accumulate=2", "model=pictures strategy=ddp devices=2",
    "model=transformer strategy=pipeline devices=2 pipeline.schedule=zbv", "model=shared strategy=fsdp devices=2", "model=adapter strategy=zero1 devices=2 accumulate=2",
)  # fmt: skip
FAR = ("remat=full precision=bf16_true", "model=frozen strategy=hsdp", "mesh.pp=2 precision=bf16")
"""Rows of models that are not dtrain's, of which the peak is predicted too high: tests/bench/RESULTS.md."""
FOUR = "strategy=fsdp devices=4"
NODES = Cluster(gpus=8, cpus=64, memory=80 << 30)


def of(decided: Plan) -> Memory:
    shapes = formulas.shapes(decided)
    assert shapes
    return memory(decided, shapes)


def test_ranks_that_share_a_sequence_share_the_weights_too() -> None:
    whole, *shards = (of(plan("data=synthetic", *words.split())) for words in ("devices=1", FOUR, f"{FOUR} mesh.cp=2"))
    assert [each.parameters for each in shards] == [pytest.approx(whole.parameters / 4, rel=0.01)] * 2


def check(words: str, within: float = 0.1) -> Compared:
    """Exact at rest and in a checkpoint; activations within 10% for models as small as those, operations within 1%."""
    compared = compare(planned(words))
    for row in compared.rows:
        for name, (predicted, real) in row.exact.items():
            assert predicted == real, name
        assert row.activations == pytest.approx(1, abs=within)
    assert compared.saved[0] == compared.saved[1], "checkpoint"
    assert compared.flops[0] == pytest.approx(compared.flops[1], rel=0.01)
    return compared


def check_peak(words: str) -> None:
    """Activations and peak within 5%."""
    for row in check(words, 0.05).rows:
        assert row.peak == pytest.approx(1, abs=0.05)


@pytest.mark.often(
    "one rank",
    "strategy=zero3 devices=2 accumulate=2",
    "*ema=0.99*",
    "*tensor.sequence=split*",
    "*mesh.ep=2",
    "*zbv",
    "model=cnn*",
)
@pytest.mark.parametrize("words", QUICK, ids=lambda words: words or "one rank")
def test_predicted_bytes_are_those_of_a_real_step(words: str) -> None:
    check_peak(words)


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in ALL if words not in QUICK])
def test_so_are_those_of_every_other_combination(words: str) -> None:
    check_peak(words)


def check_foreign(words: str) -> None:
    """Activations and peak within 10%, for models so small that a gradient is as large as their activations."""
    rows = check(words).rows
    assert any(far in words for far in FAR) or all(row.peak == pytest.approx(1, abs=0.1) for row in rows)


@pytest.mark.often("model=frozen*", "model=knotted*", "model=shared*")
@pytest.mark.parametrize("words", SEEN)
def test_so_are_those_of_models_that_are_not_dtrains(words: str) -> None:
    check_foreign(words)


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in FOREIGN if words not in SEEN])
def test_so_are_those_of_more_of_them(words: str) -> None:
    check_foreign(words)


@pytest.mark.campaign("8 ranks")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_a_pipeline_holds_no_more_of_more_microbatches(schedule: str) -> None:
    few, many = (
        resident(2, count, planned(f"{PIPELINE} {words} remat=full pipeline.schedule={schedule}"), seconds=300)
        for words in ("accumulate=8 batch=16", "accumulate=16 batch=32")
    )
    samples = 16 * (64 + 1) * 8  # sixteen more, of 64 tokens and a number
    for one, other in zip(few, many, strict=True):
        assert other["kept"] - one["kept"] <= samples


def test_the_moment_of_the_peak_adds_up() -> None:
    for words in (
        "",
        "strategy=zero3 devices=2",
        "strategy=pipeline devices=2 accumulate=4",
        "optim=muon batch=8 microbatch=1",
    ):
        compared = of(planned(words))
        assert sum(compared.moment.values()) == pytest.approx(compared.peak, abs=len(compared.moment))
        assert compared.peak > compared.parameters + compared.optimizer


def test_what_rests_in_the_memory_of_the_host_is_not_on_the_device() -> None:
    there, here = (
        of(plan(*LARGE, "nodes=8", "devices=8", "batch=64", "strategy=fsdp", f"strategy.offload={where}", on=NODES))
        for where in ("cpu", "none")
    )
    away = here.parameters + here.gradients + here.optimizer
    assert there.host - here.host == away
    assert here.peak - there.peak >= here.parameters + here.optimizer


def test_copies_in_memory_are_two() -> None:
    decided = plan("data=synthetic", "checkpoint.memory=5")
    held = of(decided)
    assert of(plan("data=synthetic")).copies == 0 and held.copies == 2 * (held.parameters + held.optimizer)


@pytest.mark.parametrize(
    "words",
    [("strategy=fsdp", "mesh.tp=8"), ("strategy=fsdp", "mesh.tp=8", "mesh.pp=4", "accumulate=8"), ("strategy=zero2",)],
)
def test_a_large_model_costs_the_same_on_any_number_of_ranks(words: tuple[str, ...]) -> None:
    """Counted in calls, because a clock would tell of the machine."""
    calls = []
    for nodes in (128, 2048):
        decided = plan(*LARGE, f"nodes={nodes}", "devices=8", f"batch={nodes * 8}", *words, on=NODES)
        calls.append(_calls(lambda decided=decided: of(decided)))
    assert calls[1] < 1.2 * calls[0] + 500
    assert max(calls) < 200_000


def test_more_shards_hold_less_and_the_sum_of_all_is_the_model() -> None:
    one, many = (
        of(plan(*LARGE, f"nodes={nodes}", "devices=8", f"batch={nodes * 8}", "strategy=fsdp", on=NODES))
        for nodes in (8, 16)
    )
    assert one.parameters == 2 * many.parameters == 4 * 70_553_706_496 // 64, (
        "as many parameters as Llama 3 70B (arXiv 2407.21783), in fp32"
    )
    assert one.peak > many.peak


def test_a_compiled_block_keeps_no_more_than_one_that_is_not() -> None:
    compiled, plain = (of(replace(planned(""), compile=files.node("compile", word))) for word in ("blocks", "none"))
    assert compiled.activations < plain.activations


@pytest.mark.gpu
@pytest.mark.parametrize(
    "words", ["", "precision=bf16", "precision=bf16 remat=full", "precision=bf16_true remat=selective"]
)
def test_the_peak_is_what_the_allocator_of_a_gpu_saw(words: str) -> None:
    from metering import peak_on_gpu

    decided = planned(
        f"{words} model.layers=8 model.width=1024 model.hidden=2752 data.sequence=1024 model.heads=16 batch=8 compile=none".strip(),
        on=detect(),
    )
    assert decided.device == "cuda"
    assert of(decided).peak == pytest.approx(peak_on_gpu(decided), rel=0.05)


def _calls(work: Any) -> int:
    """How many Python functions `work` calls."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
