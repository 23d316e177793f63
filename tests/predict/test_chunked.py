"""Predictions of a loss that computes logits a chunk at a time, beside real steps: the peak within 5%, operations equal."""

import pytest
from predicted import compare, planned

from dtrain.predict import formulas
from dtrain.predict.memory import memory
from dtrain.predict.work import work
from dtrain.tracing.tracer import trace

LARGE = "data.vocab=8192 model.layers=2 batch=16"
WORDS = (
    "", "strategy=ddp devices=2 mesh.tp=2",
)  # fmt: skip
MORE = (
    "strategy=fsdp devices=2 precision=bf16 accumulate=2", "strategy=pipeline devices=2 accumulate=4",
    "precision=bf16", "model.tied=true", "strategy=fsdp devices=2", "strategy=ddp devices=2 mesh.cp=2", "precision=fp16", "objective.chunk=100",
    "strategy=ddp devices=2 mesh.tp=2 tensor.sequence=split tensor.loss=split", "strategy=fsdp devices=4 mesh.tp=2", "model=moe",
    "strategy=pipeline devices=2 accumulate=4 pipeline.schedule=interleaved_1f1b model.layers=4",
)  # fmt: skip


def check(words: str) -> None:
    compared = compare(planned(f"{LARGE} {words}"))
    assert compared.flops[0] == pytest.approx(compared.flops[1], rel=0.01)
    for row in compared.rows[-1:]:  # the last stage
        assert all(predicted == real for predicted, real in row.exact.values())
        assert row.peak == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("words", WORDS)
def test_the_peak_is_that_of_a_real_step(words: str) -> None:
    check(words)


@pytest.mark.campaign("8 ranks")
@pytest.mark.parametrize("words", MORE)
def test_so_it_is_of_more_of_them(words: str) -> None:
    check(words)


def test_a_trace_is_the_arithmetic() -> None:
    plan = planned(f"{LARGE} precision=bf16")
    shapes = formulas.shapes(plan)
    assert shapes
    traced, _ = trace(plan)
    assert memory(plan, traced).activations == memory(plan, shapes).activations
    assert memory(plan, traced).peak == pytest.approx(
        memory(plan, shapes).peak, rel=0.025
    )  # of the last norm and the head
    assert work(plan, traced) == work(plan, shapes)


def test_fewer_logits_are_predicted() -> None:
    chunked, whole = (
        memory(plan, shapes)
        for plan in (planned(f"{LARGE} objective.chunk={chunk}") for chunk in (100, 0))
        if (shapes := formulas.shapes(plan))
    )
    assert whole.peak - chunked.peak > 1.8 * 4 * (16 * 64 - 100) * 8192
