"""Parts of a package that dtrain does not know, one of each kind: every verb takes them as it takes dtrain's own, by the facts they state."""

import json
import os
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import commands
import pytest
from small import CPUS

from dtrain.compose import compose, here
from dtrain.compose.hydra import Shelf  # noqa: F401 - Hydra is loaded before the working folder changes
from dtrain.config import files
from dtrain.errors import WordsError
from dtrain.planned import Plan
from dtrain.predict.prediction import Prediction, predict
from dtrain.resolve import resolve
from dtrain.tracing import shapes_of
from dtrain.verb.plan import explained

KIT = Path(__file__).parent / "outside"
ALL = (
    "data=waves model=net objective=ranked optim=lion schedule=saw logger=[lines] hook=[pulse] launcher=noted "
    "strategy=thin devices=2 batch=16 steps=6 evaluate.every=3 checkpoint.every=0"
)

NET = """
from torch import nn


def Net(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
"""


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the package, its words and the trust in it."""
    shutil.copytree(KIT, tmp_path / "kit", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "kit")
    for name in [name for name in sys.modules if name == "kit" or name.startswith("kit.")]:
        monkeypatch.delitem(sys.modules, name)  # of another test's folder
    monkeypatch.syspath_prepend(str(tmp_path / "kit"))
    return tmp_path / "kit"


def predicted(words: str) -> tuple[Plan, Prediction]:
    plan = resolve(compose(words.split()), CPUS)
    return plan, predict(plan, shapes_of(plan))


def command(folder: Path, *words: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    ran = commands.run(*words, cwd=folder, env=env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.often("strategy=thin*accumulate=2", "*pipeline*", "optim*")
@pytest.mark.parametrize(
    ("outside", "inside"),
    [
        ("strategy=thin devices=2 accumulate=2", "strategy=zero3 devices=2 accumulate=2"),
        ("strategy=thin devices=4 mesh.pp=2 batch=16", "strategy=zero3 devices=4 mesh.pp=2 batch=16"),
        ("pipeline.schedule=stack strategy=pipeline devices=2", "pipeline.schedule=gpipe strategy=pipeline devices=2"),
        ("optim=plain", "optim=adamw"),
        ("optim=lion precision=bf16_true", "optim=sgd precision=bf16_true"),
        ("launcher=noted devices=2 schedule=saw", "launcher=local devices=2"),
        (
            "strategy._target_=dtrain.strategy.fsdp.FSDP strategy.reshard=forward strategy.offload=none devices=2",
            "strategy=fsdp devices=2",
        ),
        ("strategy._target_=dtrain.strategy.zero1.build strategy.offload=none devices=2", "strategy=zero1 devices=2"),
    ],
)
def test_it_is_predicted_as_the_same_thing_inside(kit: Path, outside: str, inside: str) -> None:
    (_, mine), (_, ours) = predicted(outside), predicted(inside)
    assert mine.shapes.blocks, mine.shapes.unknown
    if "bf16_true" in outside:  # sgd is fused there on a GPU alone, as it is on a CPU in fp32
        assert mine.memory.optimizer == ours.memory.optimizer
        return
    assert mine.to_dict() == ours.to_dict()


def test_the_shapes_of_another_class_are_not_those_of_the_word_it_stands_for(kit: Path) -> None:
    (kit / "kit_net.py").write_text(NET)
    words = "model=mlp model._target_=kit_net.Net model.width=8 data=synthetic objective=regression trust=[kit_net]"
    _, prediction = predicted(words)
    assert prediction.shapes.parameters == 64 * 8 + 8 + 8 * 10 + 10


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("strategy=silent devices=2", "kit.strategy.Silent does not state holds"),
        ("optim=silent", "kit.optim.silent does not state state"),
    ],
)
def test_what_states_nothing_is_unknown_with_what_to_state(kit: Path, words: str, sentence: str) -> None:
    _, prediction = predicted(words)
    assert sentence in prediction.shapes.unknown
    assert "about = {" in prediction.shapes.unknown
    assert prediction.memory.peak == 0 and prediction.time is None


@pytest.mark.parametrize(
    ("file", "old", "new", "words", "sentence"),
    [
        ("strategy", '"holds": "shards"', '"holds": "pieces"', "strategy=thin", "kit.strategy.Thin states holds='pieces': holds is copies or shards."),
        ("strategy", '"fill": "dp_shard"', '"fill": "dp"', "strategy=thin", "kit.strategy.Thin states fill='dp': fill is pp, dp_replicate, dp_shard, cp or tp."),
        ("optim", '["whole"]', '"whole"', "optim=lion", "kit.optim.Lion states state={'every': 'whole'}: it maps any of hidden, matrices, every to a list"),
        ("optim", 'about: ClassVar = {"state": {"every": ["whole"]}, "needs": "elements", "copies": 2}', "about = 3", "optim=lion", "kit.optim.Lion states 3: facts are names with values"),
        ("optim", '"copies": 2', '"copied": 2', "optim=lion", "kit.optim.Lion states copied, which is no fact of optim. Its facts are "),
        ("optim", '["whole"]', '[["whole"]]', "optim=lion", "it maps any of hidden, matrices, every to a list"),
        ("optim", '"every"', '"all"', "optim=lion", "every is required"),
        ("pipeline", '"layout": "loop", ', "", "pipeline.schedule=stack strategy=pipeline", "kit.pipeline.Stack does not state layout."),
        ("pipeline", '"loop"', '"w"', "pipeline.schedule=stack strategy=pipeline", "kit.pipeline.Stack states layout='w': layout is loop or v."),
        ("pipeline", "reversed(range(count))", "range(1, count)", "pipeline.schedule=stack strategy=pipeline", "the backward of microbatch 0 in stage 0 is run 0 times by rank 0"),
        ("pipeline", 'Action("F"', 'Action("B"', "pipeline.schedule=stack strategy=pipeline", "in stage 0 is run 2 times by rank 0"),
        ("pipeline", "reversed(range(count))", "sorted(range(count), key=lambda one: one if rank else -one)", "pipeline.schedule=stack strategy=pipeline", ""),
    ],
)  # fmt: skip
def test_a_fact_or_an_order_that_means_nothing_is_refused(
    kit: Path, file: str, old: str, new: str, words: str, sentence: str
) -> None:
    source = kit / f"kit/{file}.py"
    assert old in source.read_text()
    source.write_text(source.read_text().replace(old, new))
    with pytest.raises(WordsError, match=re.escape(sentence)) if sentence else nullcontext():
        explained(resolve(compose(["devices=2", *words.split()]), CPUS))


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        (
            "schedule.teeth=0",
            "schedule.teeth=0 (command line): schedule.teeth is an integer >= 1. Type schedule.teeth=1.",
        ),
        ("model.width=1.5", "model.width=1.5 (command line): model.width is an integer. Type model.width=2."),
        ("data.samples=lots", "data.samples=lots (command line): data.samples is an integer. Type"),
        ("optim.lr=abc", "optim.lr=abc (command line): optim.lr is a number. Type"),
        ("hook.pulse.every=often", "hook.pulse.every=often (command line): hook.pulse.every is an integer. Type"),
    ],
)
def test_values_that_its_word_or_its_annotations_do_not_allow_are_refused(kit: Path, word: str, sentence: str) -> None:
    with pytest.raises(WordsError) as caught:
        resolve(compose([*ALL.split(), word]), CPUS)
    assert [problem for problem in caught.value.problems if problem.startswith(sentence)] == [*caught.value.problems]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("width: ???", "model=mine needs model.width. Type model.width=<an integer>. (model: command line)"),
        ("layers: ???", "model=mine needs model.layers. Type model.layers=<an integer>. (model: command line)"),
    ],
)
def test_what_its_word_leaves_to_the_user_is_asked_for(kit: Path, argument: str, sentence: str) -> None:
    name = argument.partition(":")[0]
    text = (kit / "conf/model/net.yaml").read_text()
    (kit / "conf/model/mine.yaml").write_text(re.sub(rf"^{name}:.*$", argument, text, flags=re.MULTILINE))
    with pytest.raises(WordsError) as caught:
        resolve(compose([*ALL.split(), "model=mine"]), CPUS)
    assert caught.value.problems == (sentence,)
    assert resolve(compose([*ALL.split(), "model=mine", f"model.{name}=2"]), CPUS).model[name] == 2


def test_auto_chooses_it_where_it_alone_fits(kit: Path) -> None:
    words = "model.width=256 batch=16 accumulate=4 devices=2 remat=none mesh.tp=1 mesh.pp=1 optim=sgd optim.momentum=0"
    peaks = {name: predicted(f"{words} strategy={name}")[1].memory.peak for name in ("fsdp", "zero2", "thin")}
    assert peaks["thin"] < min(peaks["fsdp"], peaks["zero2"])
    between = (peaks["thin"] + min(peaks["fsdp"], peaks["zero2"])) / 2
    machine = files.node("cluster", "laptop")
    room = (between * machine["reserve"] + machine["context"]) * 2
    config = compose(words.split())
    del config.options["strategy"]["fsdp"]  # with strategy.reduce=every it is the same
    found = resolve(config, CPUS.__class__(**{**vars(CPUS), "memory": int(room)}))
    assert found.strategy["_target_"] == "kit.strategy.Thin"
    assert found.why["strategy"].startswith("thin (auto: ")


def test_a_folder_of_one_schedule_of_a_pipeline_is_found(kit: Path) -> None:
    for folder in (kit / "conf").iterdir():
        if folder.name != "pipeline":
            shutil.rmtree(folder)
    plan, _ = predicted("pipeline.schedule=stack strategy=pipeline devices=2")
    assert plan.pipeline.order["_target_"] == "kit.pipeline.Stack"
    assert here.look().note == "of this folder: dtrain.yaml: trust=[kit]; ./conf: pipeline.schedule=stack"


def test_help_and_completion_know_its_words(kit: Path) -> None:
    assert "thin" in command(kit, "help", "strategy")
    assert "two" not in command(kit, "help", "optim=lion") and "the sign of a momentum" in command(
        kit, "help", "optim=lion"
    )
    assert "pipeline.schedule=stack" in command(kit, "completion", "words", "pipeline.schedule=")
    assert "strategy=thin" in command(kit, "completion", "words", "strategy=t")


def test_it_trains_as_one_process_does(kit: Path) -> None:
    """All kinds at once on two ranks, beside one process with dtrain's launcher and strategy."""
    command(kit, *ALL.split(), "out=two")
    command(kit, *ALL.replace("strategy=thin devices=2", "devices=1").replace("launcher=noted ", "").split(), "out=one")
    two, one = (
        [json.loads(line) for line in (kit / out / "metrics.jsonl").read_text().splitlines()] for out in ("two", "one")
    )
    rows = [[row for row in rows if "loss" in row] for rows in (two, one)]
    assert len(rows[0]) == 6
    for mine, alone in zip(*rows, strict=True):
        assert mine["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert mine["second"] >= mine["accuracy"] and mine["lr"] == alone["lr"]
    assert (kit / "two/noted").read_text() == "noted, 2 ranks"
    first, *_, last = (kit / "two/lines.txt").read_text().splitlines()
    assert first.startswith("two ") and last == "finished after 6"
    result: dict[str, Any] = json.loads((kit / "two/result.json").read_text())
    assert {"eval_error", "eval_second", "eval_pulse"} <= set(result["metrics"])


def test_its_pipeline_schedule_gives_the_losses_of_one_process(kit: Path) -> None:
    words = "data=synthetic model.layers=4 model.width=32 data.sequence=16 objective=next_token logger=[] hook=[] batch=8 accumulate=4 steps=3 evaluate.every=0 evaluate.samples=8"
    command(kit, *words.split(), "strategy=pipeline", "devices=2", "pipeline.schedule=stack", "out=piped")
    command(kit, *words.split(), "out=alone")
    losses = [
        [
            json.loads(line)["loss"]
            for line in (kit / out / "metrics.jsonl").read_text().splitlines()
            if '"loss"' in line
        ]
        for out in ("piped", "alone")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 3


def test_its_model_is_split_by_the_table_of_its_class(kit: Path) -> None:
    words = "data=waves model=net objective=ranked strategy=ddp devices=2 batch=16 steps=3 logger=[] hook=[]"
    command(kit, *words.split(), "out=whole", "devices=1", "strategy=single")
    command(kit, *words.split(), "out=split", "mesh.tp=2")
    whole, split = (
        [json.loads(line)["loss"] for line in (kit / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("whole", "split")
    )
    assert split == pytest.approx(whole, rel=1e-5) and len(whole) == 3
