import json

import pytest
from small import plan

from dtrain.cluster import Cluster
from dtrain.planned import Plan
from dtrain.predict.prediction import Prediction, predict
from dtrain.predict.report import count, duration, rows, short, size
from dtrain.tracing import shapes_of

GPT = ("model=gpt", "data=synthetic", "data.sequence=16", "model.layers=4")


def predicted(*words: str, on: Cluster | None = None) -> tuple[Plan, Prediction]:
    asked = plan(*GPT, *words, **({"on": on} if on else {}))
    return asked, predict(asked, shapes_of(asked))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (size(70 * 2**30), "70 GiB"), (size(1023 * 2**20), "1023 MiB"), (size(12), "12 B"), (count(70.55e9), "70.5B"), (count(12), "12"),
        (duration(0.00021), "210 us"), (duration(0.25), "250 ms"), (duration(100), "100 s"), (duration(9000), "2.5 h"), (duration(10 * 86400), "10 days"),
    ],
)  # fmt: skip
def test_figures_have_three_digits_and_a_unit(text: str, expected: str) -> None:
    assert text == expected


def test_pictures_only_where_there_is_something_to_see() -> None:
    assert {name for name, _ in rows(*predicted())} == {"memory", "", "at rest", "work", "time"}
    many = dict(rows(*predicted("devices=4", "strategy=fsdp", "mesh.pp=2", "batch=8")))
    assert {"pipeline", "placement", "collectives"} <= many.keys()


def test_every_axis_that_is_used_has_its_row() -> None:
    table = [
        text
        for _, text in rows(
            *predicted("devices=8", "strategy=fsdp", "mesh.pp=2", "mesh.tp=2", "model.width=512", "batch=64")
        )
    ]
    for axis in ("tp=2", "dp_shard=2", "pp=2"):
        assert any(text.startswith(f"{axis}  ") for text in table), axis


def test_what_does_not_decay_is_counted() -> None:
    """Of a formula, and of a model that is traced: a LayerNorm of two dims, a gate [1, 1] and two biases."""
    own = plan(
        *[
            "model._target_=optim.test_adamw.Small",
            "trust=[optim]",
            "data=synthetic",
            "objective=classification",
            "data.inputs=[24]",
        ]
    )
    told = {
        name: dict(rows(each, predict(each, shapes_of(each)))).get("work", "")
        for name, each in (("gpt", predicted()[0]), ("own", own))
    }
    assert f"({9 * 128 / 1000:.2f}k of them not decayed)" in told["gpt"], "two norms of each block, and the last"
    assert f"({12 * 2 + 1 + 12 + 10} of them not decayed)" in told["own"]
    assert "decayed" not in dict(rows(*predicted("optim.weight_decay=0")))["work"]


def test_the_parts_of_the_time_are_the_time() -> None:
    _, prediction = predicted("devices=4", "strategy=fsdp", "mesh.pp=2", "batch=64", "microbatch=2")
    time = prediction.time
    assert time
    computing = time.products + time.attention + time.activations + time.starting + time.contention
    assert computing + sum(time.collectives.values()) + time.waits + time.optimizer == pytest.approx(time.seconds)


def test_a_ring_without_a_fused_kernel_is_told_and_priced() -> None:
    """On a GPU heads of 36 numbers of 16 bits are 72 bytes, of fp32 whole 16 bytes; ulysses calls what one process does."""
    words = ("cluster=h100x8", "nodes=1", "devices=2", "strategy=ddp", "mesh.cp=2", "precision=bf16", "batch=8")
    tiles, fused, heads, high = (
        predicted(*words, *more)
        for more in (
            ["model.width=144"], ["model.width=160"], ["model.width=144", "context.attention=ulysses"], ["model.width=144", "precision=fp32"],
        )
    )  # fmt: skip
    said = "on a GPU torch fuses no attention to heads of 36: the ring multiplies tiles of scores in fp32"
    assert [said in [text for _, text in rows(*each)] for each in (tiles, fused, heads, high)] == [
        True,
        False,
        False,
        False,
    ]
    spent = [prediction.time.attention for _, prediction in (tiles, fused, heads) if prediction.time]
    assert spent[2] < spent[1] < spent[0]


def test_of_a_machine_that_is_not_known_no_time_is_claimed() -> None:
    asked, prediction = predicted("devices=1", on=Cluster(gpus=1, cpus=8, gpu="NVIDIA GeForce RTX 3060"))
    assert prediction.time is None
    assert prediction.fits
    assert [name for name, _ in short(asked, prediction)] == ["memory"]


def test_tools_read_the_same_as_json() -> None:
    _, prediction = predicted("devices=4", "strategy=fsdp", "mesh.pp=2", "batch=8")
    read = json.loads(json.dumps(prediction.to_dict(), allow_nan=False))
    assert read["memory"]["peak"] == prediction.memory.peak
    assert read["time"]["seconds"] == prediction.time.seconds  # type: ignore[union-attr]
    assert sum(call["bytes"] for call in read["calls"]) == sum(call.bytes for call in prediction.calls)
    assert read["parameters"] == prediction.shapes.parameters
    assert read["fits"] is True


def test_what_a_model_sends_that_looks_into_its_numbers_is_called_a_guess() -> None:
    words = "model._target_=tracing.test_tracer.Peeking trust=[tracing] data=synthetic objective=regression data.inputs=[24] data.outputs=3 batch=8 devices=2"
    asked = plan(*words.split(), "strategy=fsdp")
    assert any(text.startswith("a guess: every block") for _, text in rows(asked, predict(asked, shapes_of(asked))))


def test_a_host_that_python_and_torch_fill_has_no_memory_left_for_a_rank() -> None:
    asked, prediction = predicted("devices=2", "strategy=ddp", "cluster=laptop", "cluster.memory=4e8")
    assert prediction.budget == 0 and not prediction.fits
    assert "(of 0 B that Python and torch leave)" in dict(rows(asked, prediction))["memory"]
