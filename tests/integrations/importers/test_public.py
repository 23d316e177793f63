"""Public configs of eight tools: the command that import prints, its placeholders filled, is a plan of the same training, by tables made by hand."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from imported import Imported
from integrations.importers.public.further import FURTHER
from integrations.importers.public.jsons import ACCELERATE, DEEPSPEED
from integrations.importers.public.row import Row
from integrations.importers.public.scripts import LIGHTNING, RAY
from integrations.importers.public.trees import AXOLOTL, TORCHTITAN, TORCHTUNE
from integrations.importers.public.trl import TRANSFORMERS

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.integrations.importers import complete, load, recognise, translate
from dtrain.integrations.importers.read import parse
from dtrain.integrations.importers.write import command, recipe
from dtrain.planned import Part, Plan
from dtrain.resolve import resolve

ROWS = {
    "accelerate": ACCELERATE, "axolotl": AXOLOTL, "deepspeed": DEEPSPEED, "lightning": LIGHTNING, "ray": RAY, "torchtitan": TORCHTITAN, "torchtune": TORCHTUNE, "transformers": TRANSFORMERS,
}  # fmt: skip
EACH = [pytest.param(tool, row, id=row.source.rpartition("/")[2]) for tool, rows in ROWS.items() for row in rows]
TWO_TOOLS = {"ray-project/ray doc/source/train/doc_code/getting_started_lightning.py"}
"""A script of Lightning under Ray Train, of which as= says which is read."""


def read(tool: str, row: Row) -> Imported:
    place = row.source.rpartition("/")[2]
    tree = parse(row.said.encode(), place) if isinstance(row.said, str) else row.said
    name = tool if row.source in TWO_TOOLS else recognise(tree, place)
    ledger = translate(tree, name, place)
    complete(ledger, load(name).SILENT)
    return Imported(name, ledger, recipe(ledger, load(name).SILENT, "mine.yaml"))


OF_CODE = {"model": "gpt", "data": "text", "data.holdout": 0.1}
"""What nearly every file leaves to code, and its command asks for."""


def typed(read: Imported, given: dict[str, Any], place: Path) -> list[str]:
    """The words of the printed command, in which every placeholder has a value; of epochs, whose data is not here, the
    steps."""
    values = OF_CODE | given
    words = dict(word.split("=", 1) for word in shlex.split(command(read.ledger, str(place)))[1:])
    return [
        one
        for word, value in words.items()
        for one in (f"{word}={values[word]}".split() if value.startswith("<") else [f"{word}={value}"])
    ] + read.counted


def chosen(part: Part) -> str:
    """The word of ours that a part is, or the class it is told to be."""
    target = str(part["_target_"])
    if target == "dtrain.model.hf.load":
        return str(part["name"])
    return (
        target.split(".")[2] if target.startswith("dtrain.") else str(part.get("pretrained_model_name_or_path", target))
    )


def facts(plan: Plan) -> dict[str, Any]:
    groups = {
        name: getattr(plan, name)
        for name in (
            "strategy",
            "precision",
            "optim",
            "schedule",
            "model",
            "adapter",
            "data",
            "objective",
            "backend",
            "remat",
        )
    }
    arguments = {
        f"{name}.{key}": groups[name].get(key)
        for name in ("optim", "schedule", "adapter", "data", "objective")
        for key in groups[name]
    }
    mesh = {f"mesh.{axis}": getattr(plan.mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
    return {
        **{name: chosen(part) for name, part in groups.items()}, **arguments, **mesh, "batch": plan.batch.size, "batch.micro": plan.batch.microbatch,
        "batch.accumulate": plan.batch.accumulate, "steps": plan.steps, "clip": plan.clip, "seed": plan.seed, "nodes": plan.nodes, "devices": plan.devices,
        "offload": plan.strategy.get("offload"), "weights": plan.model.get("weights"), "task": plan.model.get("task"), "config": plan.model.get("config"), "reshard": plan.strategy.get("reshard"), "scale": [plan.precision.get("scale"), plan.precision.get("growth")],
        "compile": chosen(plan.compile), "log.every": plan.log_every, "evaluate.every": plan.evaluate_every, "restarts": plan.launcher.get("restarts"),
    }  # fmt: skip


@pytest.mark.parametrize(("tool", "row"), EACH)
def test_the_printed_command_is_the_same_training(
    tool: str, row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_SECRET", "0123456789abcdef0123456789abcdef")
    imported = read(tool, row)
    assert imported.name == tool
    assert imported.asked == set(row.typed) - OF_CODE.keys(), command(imported.ledger, "mine.yaml")
    assert not set(row.refused) - set(imported.told("refused"))
    place = tmp_path / "mine.yaml"
    place.write_text(imported.recipe)
    devices = imported.words.get("devices", 1)
    plan = resolve(compose(typed(imported, row.typed, place)), Cluster(gpus=row.typed.get("devices", devices), cpus=2))
    training = {**facts(plan), "epochs": imported.words.get("epochs")}
    assert {name: training.get(name) for name in row.means} == row.means


@pytest.mark.parametrize(
    ("tool", "row"),
    [each for each in EACH if {"model", "optim", "optim.lr", "precision", "clip"} & set(each.values[1].typed)],
)  # type: ignore[attr-defined]
def test_what_a_run_needs_and_a_file_leaves_open_has_no_default_in_its_place(
    tool: str, row: Row, tmp_path: Path
) -> None:
    imported = read(tool, row)
    place = tmp_path / "mine.yaml"
    place.write_text(imported.recipe)
    with pytest.raises(WordsError) as raised:
        resolve(compose([f"recipe={place}"]), Cluster(gpus=8, cpus=2))
    for word in {"model", "data", "optim", "precision", "clip"} & imported.ledger.command.keys():
        assert f" leaves {word} to you. Type {word}=<" in str(raised.value), word


def differences(tool: str, row: Row, place: Path) -> dict[str, Any]:
    """What the plan of a file has other than the tool itself, or asks for otherwise than by hand."""
    imported = read(tool, row)
    place.write_text(imported.recipe)
    other: dict[str, Any] = {} if imported.name == tool else {"tool": imported.name}
    other |= dict.fromkeys(imported.asked ^ row.typed.keys() - OF_CODE.keys(), "is not asked as by hand")
    other |= dict.fromkeys(set(row.refused) - set(imported.told("refused")), "is not refused")
    if other:
        return other
    gpus = row.typed.get("devices", imported.words.get("devices", 1))
    plan = resolve(compose(typed(imported, row.typed, place)), Cluster(gpus=gpus, cpus=2))
    training = {**facts(plan), "epochs": imported.words.get("epochs")}
    return {word: [value, training.get(word)] for word, value in row.means.items() if training.get(word) != value}


def test_forty_more_are_planned_as_their_tools_train_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_SECRET", "0123456789abcdef0123456789abcdef")
    rows = [(tool, row) for tool, rows in FURTHER.items() for row in rows]
    assert len({row.source for _, row in rows}) == len(rows) == 40
    table = {row.source: differences(tool, row, tmp_path / f"{at}.yaml") for at, (tool, row) in enumerate(rows)}
    assert {source: other for source, other in table.items() if other} == {}


def test_there_are_enough_of_them() -> None:
    assert len(EACH) >= 60
    assert len({row.values[1].source for row in EACH}) == len(EACH)  # type: ignore[attr-defined]
