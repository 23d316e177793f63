"""`dtrain plan best`: the fastest layouts that fit, of all that the words leave open."""

import json
import re
from typing import Any

import pytest
from small import composed

from dtrain.cluster import detect
from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.predict.prediction import predict
from dtrain.predict.report import count
from dtrain.predict.shapes import Shapes
from dtrain.resolve import resolve
from dtrain.tracing import shapes_of
from dtrain.verb import plan

B8 = ("cluster=h100x8", "nodes=2", "data=synthetic", "data.sequence=8192", "model.layers=32", "model.width=4096", "model.heads=32", "batch=64")  # fmt: skip


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert plan.run(["best", *words]) == 0
    return capsys.readouterr().out.splitlines()


def found(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert plan.run(["best", "json", *words]) == 0
    layouts: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return layouts


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("data.vocab=50304", "mesh.pp=4", "pipeline.schedule=interleaved_1f1b", "strategy=fsdp"),
        ("mesh.cp=2", "context.attention=ulysses", "strategy=fsdp"),
    ],
    ids=["free", "chunks twice", "ulysses"],
)
def test_each_layout_is_what_its_words_are_predicted_to_be(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    layouts = found(capsys, *B8, *words)
    assert layouts and (words or len(layouts) == 10)
    for layout in layouts:
        typed = resolve(composed(*B8, *words, *layout["words"]), detect())  # type: ignore[misc]
        prediction = predict(typed, shapes_of(typed)).to_dict()
        assert {key: layout[key] for key in ("time", "memory", "work")} == {
            key: prediction[key] for key in ("time", "memory", "work")
        }
        assert prediction["fits"]


def test_auto_takes_the_first_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = found(capsys, *B8)[0]["words"]
    assert " ".join(words) in resolve(composed(*B8), detect()).why["strategy"]  # type: ignore[arg-type]


def test_a_first_layout_that_is_not_the_fastest_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "cluster=h100x8", "devices=4", "model.layers=32", "model.width=4096", "model.heads=32", "data=synthetic",
        "data.sequence=32768", "data.vocab=128256", "remat=none",
    )  # fmt: skip
    *table, last = rows(capsys, *words)
    first, second, *_ = (float(line.split()[0]) for line in table if re.match(r"[\d.]+ s .*strategy", line))
    assert first > second and "The first is preferred" in last and "splits the model along more axes" in last
    assert "but it splits the model along more axes" in resolve(composed(*words), detect()).why["strategy"]


def test_what_is_said_stays(capsys: pytest.CaptureFixture[str]) -> None:
    for layout in found(capsys, *B8, "strategy=fsdp", "strategy.offload=cpu", "mesh.tp=2", "remat=selective"):
        keys = {word.partition("=")[0]: word for word in layout["words"]}  # type: ignore[attr-defined]
        assert keys["strategy"] == "strategy=fsdp"
        assert not {"mesh.tp", "remat", "strategy.offload"} & set(keys)


def test_the_table_has_a_row_for_each_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    counted, heads, *table = rows(capsys, *B8)
    assert re.match(r"[\d,]+ layouts: ", counted)
    assert heads.split()[:2] == ["a", "step"]
    assert sum("strategy=" in row for row in table) == 10
    assert max(map(len, [counted, heads, *table])) <= 100


def test_layouts_on_one_mesh_that_take_as_long_are_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = found(capsys, *B8)
    alike = [layout["words"] for layout in others if _about_as(layout, first)]
    assert not alike


def _about_as(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def place(layout: dict[str, Any]) -> set[str]:
        return {word for word in layout["words"] if word.startswith(("mesh.", "remat", "pipeline"))}

    seconds = [layout["time"]["seconds"] for layout in (one, other)]
    return place(one) == place(other) and max(seconds) <= 1.01 * min(seconds)


def test_where_nothing_fits_the_memory_of_the_host_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*B8, "nodes=1", "devices=1", "batch=8")
    layouts = found(capsys, *words)
    assert layouts and all("strategy.offload=cpu" in layout["words"] for layout in layouts)  # type: ignore[operator]
    assert resolve(composed(*words, *layouts[0]["words"]), detect())  # type: ignore[misc]
    assert not found(capsys, *words, "strategy=ddp"), "what is said stays"


def test_little_headroom_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = found(capsys, *B8, "strategy=fsdp")
    peak = layouts[0]["memory"]["peak"]  # type: ignore[index]
    budget = layouts[0]["budget"]
    lost = (int(budget) - int(peak) * 1.01) / int(budget)  # type: ignore[call-overload]
    memory = 80 * 2**30 * (1 - lost)
    _, _, *table = rows(capsys, *B8, "strategy=fsdp", f"cluster.memory={memory:.0f}")
    assert any(" tight " in row for row in table) and not all(" tight " in row for row in table)


PRICED = ("target=cost", "cluster=h100x8", "cluster.price=2.5", "data=synthetic", "model.layers=8", "batch=48", "steps=100", "strategy=fsdp", "remat=none", "mesh.tp=1", "mesh.cp=1", "mesh.pp=1")  # fmt: skip


def test_the_cheapest_runs_are_found_on_any_number_of_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    cheapest = found(capsys, *PRICED, "nodes=3")
    prices = [layout["price"] for layout in cheapest]
    assert prices == sorted(prices)  # type: ignore[type-var]
    assert {layout["words"][0] for layout in cheapest} == {"nodes=1", "nodes=2", "nodes=3"}  # type: ignore[index]
    alone = [layout for nodes in (1, 2, 3) for layout in found(capsys, *PRICED[1:], f"nodes={nodes}")]
    assert prices == sorted(layout["price"] for layout in alone)[:10]  # type: ignore[type-var]
    for layout in cheapest:
        typed = resolve(composed(*PRICED[1:], *layout["words"]), detect())  # type: ignore[misc]
        time = predict(typed, shapes_of(typed)).time
        assert time
        assert layout["price"] == pytest.approx(time.seconds * 100 / 3600 * typed.world * 2.5)


def test_numbers_of_nodes_that_the_words_do_not_allow_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = found(capsys, *PRICED, "nodes=2", "mesh.dp_replicate=16")
    assert layouts and all(layout["words"][0] == "nodes=2" for layout in layouts)  # type: ignore[index]
    assert plan.run(["best", "json", *PRICED, "nodes=16"]) == 0
    out, note = capsys.readouterr()
    assert {layout["words"][0] for layout in json.loads(out)} == {"nodes=1", "nodes=2"}
    assert "left out: nodes=16, 4, 8. With nodes=16: batch=48 does not split over 128" in note
    with pytest.raises(WordsError, match="does not split over 128"):
        plan.run(["best", *PRICED, "nodes=16", "batch=7"])


def test_a_node_without_gpus_has_one_price(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (found(capsys, "cluster=laptop", "cluster.price=3", "data=synthetic", f"devices={n}") for n in (1, 2))
    for layout in (*one, *two):
        assert layout["price"] == pytest.approx(layout["time"]["seconds"] * 1000 / 3600 * 3)  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "unit", "rate", "ranks"),
    [
        ("devices=2 data=synthetic", "tokens/s/rank", "tokens_per_second", 2),
        ("cluster=h100x8 data=synthetic model=mlp", "samples/s/GPU", "samples_per_second", 8),
    ],
)
def test_the_column_of_speed_has_the_unit_of_the_plan(
    words: str, unit: str, rate: str, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _, heads, first, *_ = rows(capsys, *words.split())
    time = found(capsys, *words.split())[0]["time"]
    assert (heads.split()[2], first.split()[2]) == (unit, count(time[rate] / ranks))  # type: ignore[index]
    assert plan.run(words.split()) == 0
    assert unit in capsys.readouterr().out


def test_the_price_is_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*PRICED, "nodes=1", "cluster.price=1e9")
    _, heads, *table = rows(capsys, *words)
    assert heads.split()[-2:] == ["price", "words"]
    prices = [f"{layout['price']:,.0f}" for layout in found(capsys, *words)]
    assert [row.split("nodes=1")[0].split()[-1] for row in table if "nodes=1" in row] == prices
    assert max(map(len, table)) <= 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("target=cost", "cluster=h100x8"), "price of a GPU is not known. Type cluster.price=2.5, for an hour of one,"),
        (("target=cost",), "of a GPU, or of a node without GPUs, is not known. Type cluster=<word> cluster.price=2.5"),
        (("target=cost", "cluster=laptop"), "the price of a node is not known"),
        (("target=costs",), "target=costs: time or cost. Did you mean cost?"),
        (
            ("target=cost", "cluster=h100x8", "cluster.price=0"),
            "cluster.price is a number > 0 and <= 1000000000 or null",
        ),
    ],
)
def test_without_a_price_there_is_no_cost(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(WordsError, match=re.escape(said)):
        plan.run(["best", "data=synthetic", *words])


def test_where_none_fits_the_one_that_needs_the_least_memory_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, sentence = rows(capsys, *B8, "nodes=1", "devices=1", "model.layers=200")
    assert sentence.startswith("none fits. The least memory has strategy=")
    assert sentence.endswith("Type more nodes or devices, or a smaller model."), "forwards of one sample stay so"
    *_, sentence = rows(capsys, *B8, "nodes=1", "devices=1", "model.layers=200", "microbatch=2")
    assert sentence.endswith("or a smaller model."), "state alone does not fit"
    *_, sentence = rows(capsys, *B8, "nodes=1", "devices=1", "model.layers=8", "microbatch=64")
    assert sentence.endswith("Type more nodes or devices, or a smaller batch.")


def test_the_numbers_of_nodes_of_what_needs_the_least_memory_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    *_, sentence = rows(capsys, *PRICED, "nodes=2", "model.layers=400", "model.width=8192", "model.heads=64")
    assert "The least memory has nodes=2 strategy=" in sentence
    assert found(capsys, *PRICED, "model.layers=400", "model.width=8192", "model.heads=64") == []


@pytest.mark.parametrize("more", [(), ("nodes=1", "devices=1", "model.layers=200")])
def test_each_layout_is_counted_once(more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    counted = rows(capsys, *B8, *more)[0]
    looked, *ruled = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", counted)]
    out, predicted, *ends = ruled if "rule out" in counted else [0, *ruled]
    assert looked == out + predicted and predicted == sum(ends)


def test_a_strategy_of_ones_own_is_one_layout() -> None:
    with pytest.raises(WordsError, match="Leave strategy out"):
        plan.run(["best", "strategy._target_=mine.Mine", "trust=[mine]", "data=synthetic"])


OWN = ("data=synthetic", "devices=2", "trust=[right_models,strange]")
RECURRENT = (*OWN, "model._target_=right_models.Recurrent", "model.kind=LSTM", "data.sequence=8", "objective=next_token")  # fmt: skip


def test_a_model_without_blocks_has_the_layouts_that_split_no_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = found(capsys, *RECURRENT)
    words = [" ".join(layout["words"]) for layout in layouts]  # type: ignore[arg-type]
    assert {one.split()[0] for one in words} == {"strategy=ddp", "strategy=fsdp"}, (
        "zero1 and zero2 take as long as fsdp"
    )
    assert not any("remat" in one or "mesh.pp" in one for one in words), "they change nothing, or are refused"
    small = resolve(composed(*RECURRENT, "cluster=laptop", "cluster.memory=8e8"), detect(), shapes_of)
    assert "parameters need about" in small.why["strategy"], "strategy=auto compares them too"


def test_where_rules_refuse_every_layout_one_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Plan) -> Shapes:
        raise WordsError("it cannot be split.")

    monkeypatch.setattr("dtrain.verb.best.shapes_of", refuse)
    with pytest.raises(WordsError, match=r"no layout is left\. it cannot be split"):
        plan.run(["best", "data=synthetic", "devices=2"])


def test_a_model_whose_size_is_not_known_is_not_searched() -> None:
    words = ("model._target_=right_models.Recurrent", "model.kind=Linear", "objective=regression", "data.inputs=[8]")
    with pytest.raises(WordsError, match=r"is not known: .*num_layers"):
        plan.run(["best", *OWN, *words])
