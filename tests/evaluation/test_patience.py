"""An early stop: after so many evaluations without an improvement, at the same step whatever happened before."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from killing import leavings, survive
from pool import resident
from small import on_mesh, plan

from dtrain.cluster import Cluster as Machine
from dtrain.errors import WordsError
from dtrain.evaluation.patience import Patience
from dtrain.launcher.run import finished
from dtrain.mesh import Mesh
from dtrain.planned import Plan
from dtrain.train import train

WORDS = (
    "model=mlp", "data=synthetic", "objective=classification", "optim.lr=0.03", "steps=400", "evaluate.every=10",
    "stop.metric=eval_loss", "stop.patience=3", "logger=[]", "hook=[]",
)  # fmt: skip
ONE = Machine(gpus=0, cpus=1)


def seen(judge: Patience, step: int, value: float) -> str:
    judge.see(step, {"m": value})
    return judge.over(step)


def stops(values: list[float], *, least: float = 0.0, is_best: str = "lowest", patience: int = 2) -> int:
    """The number of evaluations after which the run ends; 0: never."""

    def over(mesh: Mesh) -> int:
        stop = {"metric": "m", "is_best": is_best, "patience": patience, "least": least}
        judge = Patience(stop, every=10, mesh=mesh, seen={})
        ended = (number for number, value in enumerate(values, 1) if seen(judge, 10 * number, value))
        return next(ended, 0)

    (number,) = on_mesh(over, dp_shard=1)
    return int(number)


def test_it_ends_after_so_many_evaluations_without_an_improvement() -> None:
    assert stops([3, 2, 2.5, 2]) == 4, "the same is no improvement"
    assert stops([3, 2, 2.5, 1.9, 1.8, 1.7]) == 0
    assert stops([0.1, 0.3, 0.2, 0.2], is_best="highest") == 4
    assert stops([3, 2.95, 2.91, 2.8], least=0.1) == 3, "a little is none"
    assert stops([3, math.nan, math.nan]) == 3
    assert stops([math.nan, math.nan]) == 2


def test_what_was_evaluated_after_a_checkpoint_counts_when_it_comes_again() -> None:
    def over(mesh: Mesh) -> list[str]:
        stop = {"metric": "m", "is_best": "lowest", "patience": 2, "least": 0.0}
        known = {10: 1.0, 15: 9.0, 20: 2.0, 30: 3.0}  # the run is restored to step 20
        judge = Patience(stop, every=10, mesh=mesh, seen=known)
        return [judge.over(20), *(seen(judge, step, value) for step, value in ((30, 0.5), (40, 3.0), (50, 3.0)))]

    (said,) = on_mesh(over, dp_shard=1)
    assert said == ["", "", "", "m has not improved in 2 evaluations, since step 30"]


def made(out: Path, *words: str) -> Plan:
    return plan(*WORDS, f"out={out}", *words, on=ONE)


def run(asked: Plan) -> Any:
    return resident(asked.world, train, asked)[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(made(tmp_path_factory.mktemp("reference")))


@pytest.mark.parametrize(
    "words", [(), pytest.param(("strategy=ddp", "devices=2"), marks=pytest.mark.campaign("kills"))]
)
def test_a_run_that_was_stopped_ends_at_the_same_step(reference: Any, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Stopped between two evaluations, then after the last that counts, whose record is lost."""
    assert reference.status == "finished" and 40 <= reference.step < 400
    at = reference.step
    assert run(made(tmp_path, *words, "stop_after=25")).step == 25, "its own evaluation does not count"
    assert run(made(tmp_path, *words, f"stop_after={at - 1}")).step == at - 1
    again = run(made(tmp_path, *words))
    assert (again.status, again.step, again.reason) == ("finished", at, reference.reason)
    assert again.metrics == pytest.approx(reference.metrics, rel=1e-5)
    events = tmp_path / "events.jsonl"
    lines = [line for line in events.read_text().splitlines() if f'"step": {at}, "eval' not in line]
    assert len(lines) + 1 == len(events.read_text().splitlines())
    events.write_text("\n".join(lines) + "\n")
    (tmp_path / "result.json").unlink()
    after = run(made(tmp_path, *words))
    assert (after.step, after.reason, after.metrics) == (at, again.reason, again.metrics), "nothing was trained again"


def test_a_finished_run_does_not_go_on_unless_it_is_given_more_patience(reference: Any, tmp_path: Path) -> None:
    asked = made(tmp_path)
    run(asked)
    (tmp_path / "plan.yaml").write_text(asked.document())
    ended = finished(asked)
    assert ended and ended.step == reference.step and ended.exit_code == 0
    assert finished(made(tmp_path, "stop.patience=4")) is None
    assert finished(replace(asked, stop={})) is None
    assert run(made(tmp_path, "stop.patience=4")).step == reference.step + 10
    last = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "finished" and "not improved in 4 evaluations" in last["reason"]


@pytest.mark.campaign("kills")
def test_a_killed_run_ends_at_the_same_step(tmp_path: Path) -> None:
    words = [*WORDS, "launcher=local", "launcher.restarts=1000", "checkpoint.every=7", "stop.patience=40", "steps=2000"]
    words += ["strategy=ddp", "nodes=2", "optim.lr=0.003"]
    survive(words, tmp_path / "untouched", kills=0, seed=0)
    done = survive(words, tmp_path / "killed", kills=8, seed=1, longest=0.5)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("untouched", "killed")]
    one, other = ({name: result[name] for name in ("status", "step", "reason", "metrics")} for result in results)
    assert one == other, done
    assert "has not improved" in one["reason"]
    assert leavings(tmp_path / "killed") == leavings(tmp_path / "untouched")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("stop.metric=eval_los",), "no evaluation of this run has this figure. Did you mean eval_loss?"),
        (("stop.metric=accuracy",), "Did you mean eval_accuracy?"),
        (("stop.metric=f1", "evaluate.metrics=[f1]"), "Did you mean eval_f1?"),
        (("checkpoint.best=f1", "evaluate.metrics=[f1]"), "Did you mean eval_f1?"),
        (("stop.metric=eval_loss", "evaluate.every=0"), "evaluate.every=0 leaves one evaluation"),
        (("stop.metric=eval_loss", "data.holdout_part=0"), "nothing is held out to measure it on. Type data.holdout"),
        (("stop.metric=null", "stop.patience=2"), "stop.patience: nothing in this run reads it. Type stop.metric="),
    ],
)
def test_a_stop_that_cannot_be_is_refused(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(WordsError) as error:
        plan("model=mlp", "data=synthetic", "objective=classification", *words)
    assert said in str(error.value)
