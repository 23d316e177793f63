"""What a training predicts before it begins."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import commands
import pytest

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.launcher import apart
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.resolve import resolve
from dtrain.result import Result
from dtrain.verb import train
from dtrain.verb.overview import overview

WORDS = ["model=mlp", "data=synthetic"]


def planned(memory: int, *words: str) -> Plan:
    return resolve(compose([*WORDS, *words]), Cluster(gpus=0, cpus=2, memory=memory))


def before(plan: Plan, *words: str) -> str:
    return overview(plan, compose([*WORDS, *words]))


def test_a_run_says_in_a_dozen_lines_what_was_asked_and_decided() -> None:
    many = (
        "strategy=fsdp", "devices=4", "mesh.tp=2", "optim.lr=0.02", "model.width=64", "objective=classification", "stop.metric=eval_loss",
        "stop.patience=3", "evaluate.every=50", "evaluate.metrics=[accuracy,f1]", "on_spike=skip", "spike.sigma=6", "steps=70", "seed=3",
        "tensor.loss=whole", "checkpoint.every=10", "clip=0.5", "log.every=5", "data.samples=4096", "data.seed=4",
    )  # fmt: skip
    lines = before(planned(1 << 32, *many), *many).splitlines()
    assert len(lines) <= 14
    text = " ".join(line.strip() for line in lines)
    assert all(
        part in text for part in ("mlp", "70 steps", "seed 3", "optim.lr=0.02", "tp=2", "eval_loss", "peak ", "a step")
    )
    assert lines[-1].startswith("out ")
    assert len(before(planned(1 << 32)).splitlines()) <= 10


def test_a_run_that_does_not_fit_is_warned_of_before_it_begins() -> None:
    assert "warning" not in before(planned(1 << 30))
    assert "\nwarning " in before(planned(1 << 10))


def test_shapes_that_a_run_has_asked_for_are_predicted_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(1 << 30)
    shapes, own = formulas.shapes(plan), replace(plan, model={**plan.model, "_about_": {}})
    assert "not predicted for a model that is not one of dtrain's" in before(own)
    monkeypatch.setattr(apart, "_known", {apart._key(own): {}})
    monkeypatch.setattr(apart, "shapes_of", lambda plan: shapes)
    assert "not predicted" not in before(own)


def test_epochs_of_a_run_whose_files_grew_are_told_with_the_steps_that_it_began_with(tmp_path: Path) -> None:
    words = ("model=mlp", "data=csv", "data.path=rows.csv", "data.targets=label", "objective=classification", "batch=9")
    rows = "".join(f"{row / 9},{row % 2}\n" for row in range(40))
    (tmp_path / "rows.csv").write_text(f"a,label\n{rows}")
    run = partial(commands.run, *words, "hook=[]", "logger=[]", "out=run", cwd=tmp_path)
    assert "note:" not in run("epochs=2", "stop_after=2").stderr
    assert "note:" not in run("epochs=3", "stop_after=3").stderr, "the words changed, not the rows"
    (tmp_path / "rows.csv").write_text(f"a,label\n{rows * 2}")
    grown = run("epochs=3", "stop_after=4").stderr
    assert "note: epochs=3 counts the rows that are there now: 24 steps. This run began with 12 steps" in grown
    assert "Type steps=12 instead" in grown
    done = run("steps=12")
    assert "finished after 12 steps" in done.stdout and "note:" not in done.stderr


@pytest.mark.parametrize("word", ["epochs=2", "steps=9"])
def test_a_finished_run_goes_on_by_the_word_that_ended_it(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = resolve(compose([word, "model=mlp", "data=synthetic"]), Cluster(gpus=0, cpus=2))
    monkeypatch.setattr(train, "finished", lambda plan: Result("finished", plan.steps, 0.5, 1.0))
    assert train.already_finished(plan, say=True)
    assert f"Type {word.split('=')[0]}=<more> to continue" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("loss", "shown"), [(0.0, "0.0000"), (0.12345, "0.1235"), (2.1e-5, "2.1e-05"), (-3.0, "-3.0000")]
)
def test_a_loss_that_four_decimals_do_not_show_has_digits(loss: float, shown: str) -> None:
    said = train.farewell(planned(1 << 30), Result("finished", 5, loss, 1.0))
    assert f"last step's loss {shown} ·" in said


def test_checkpoints_that_a_resume_no_longer_keeps_are_told(tmp_path: Path) -> None:
    words = ("model=mlp", "data=synthetic", "steps=6", "checkpoint.every=2", "logger=[]", "launcher=inline", "out=run")
    first = commands.run(*words, "checkpoint.keep_every=2", "stop_after=4", cwd=tmp_path)
    again = commands.run(*words, cwd=tmp_path)
    assert (first.returncode, again.returncode) == (0, 0), again.stderr
    assert "checkpoint.keep_every=2 was asked of this run before" in again.stderr
