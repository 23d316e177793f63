"""Figures that are no means: made once of the sums of the whole batch, so that they are the same on every mesh."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankFailed, resident

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.errors import WordsError
from dtrain.evaluation.evaluate import evaluate
from dtrain.objective import Loss, add_losses, loss_of
from dtrain.objective.classification import Classification
from dtrain.objective.figures import figures
from dtrain.objective.next_token import NextToken
from dtrain.planned import Plan
from dtrain.report.runs import below, directions
from dtrain.resolve import resolve
from dtrain.train import train

WORDS = (
    "data=synthetic",
    "logger=[]",
    "data.samples=130",
    "model=mlp",
    "steps=2",
    "batch=8",
    "evaluate.samples=null",
    "evaluate.every=1",
    "trust=[right_models]",
)
OWN = ("objective._target_=right_models.F1", "data.task=classification", "data.outputs=3", "hook=[]")


def plan_of(out: Path, *words: str) -> Plan:
    return resolve(compose([*WORDS, f"out={out}", *words]), Cluster(gpus=0, cpus=1))


def run(out: Path, *words: str) -> tuple[list[float], dict[str, Any]]:
    """F1 of each step, and held-out figures."""
    plan = plan_of(out, *WORDS, *OWN, *words)
    metrics = resident(plan.world, train, plan)[0].metrics
    return [json.loads(line)["f1"] for line in (out / "metrics.jsonl").read_text().splitlines()], metrics


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Any]]:
    return run(tmp_path_factory.mktemp("alone") / "run", "devices=1")


def test_of_one_process_they_are_those_of_all_samples_at_once(alone: Any, tmp_path: Path) -> None:
    steps, heldout = alone
    assert all(0 < f1 <= 1 for f1 in (*steps, heldout["eval_f1"])) and heldout.keys() == {
        "eval_loss",
        "eval_accuracy",
        "eval_f1",
    }
    assert heldout["eval_f1"] != pytest.approx(heldout["eval_accuracy"])


@pytest.mark.parametrize(
    "words",
    [
        "strategy=ddp devices=2",
        "strategy=fsdp devices=2 microbatch=2",
        "devices=2 mesh.tp=2",
        "devices=2 mesh.pp=2 microbatch=2",
    ],
)
def test_every_mesh_has_the_same(words: str, alone: Any, tmp_path: Path) -> None:
    steps, heldout = run(tmp_path / "run", *words.split())
    assert steps == alone[0], "whole counts, so the same digits"
    assert heldout["eval_f1"] == alone[1]["eval_f1"]


def test_the_verb_evaluate_measures_the_same_on_another_mesh(alone: Any, tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", *WORDS, *OWN, "strategy=ddp", "devices=2", "microbatch=2")
    heldout = resident(2, train, plan)[0].metrics
    again = resident(1, evaluate, plan_of(tmp_path / "run", *WORDS, *OWN, "devices=1"))[0].metrics
    assert again.keys() == heldout.keys() and again["eval_f1"] == heldout["eval_f1"] == alone[1]["eval_f1"]


def test_a_sum_with_dims_that_nothing_is_made_of_is_named() -> None:
    with pytest.raises(
        WordsError, match=r"its sum confusion has the shape \[2, 2\].* Give the class a method figures\(sums, count\)"
    ):
        figures(Classification(), {"loss": [], "confusion": [2, 2]}, [1.0, 1.0, 2.0, 3.0, 4.0], 10)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"f1": "0.5 or so"}, "'f1' as a str, '0.5 or so'"),
        ({"f1": None}, "'f1' as a NoneType"),
        ({"f1": torch.ones(2)}, "'f1' as a Tensor"),
        ({1: 0.5}, "1 as a float"),
    ],
)
def test_a_figure_that_is_no_number_is_named(own: dict[Any, Any], message: str) -> None:
    class Odd(Classification):
        def figures(self, sums: Any, count: float) -> Any:
            return own

    with pytest.raises(
        WordsError, match=f"objective Odd: its figures returned {message}.*Let it return a dict of numbers by name"
    ):
        figures(Odd(), {"loss": []}, [1.0], 10)


class Counting(Classification):
    """Its loss has the metrics that it is given."""

    def __init__(self, metrics: dict[Any, Any]) -> None:
        super().__init__()
        self.metrics = metrics

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss(torch.zeros(()), self.metrics)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"f1": 1.0}, "'f1' is a float"),
        ({"f1": None}, "'f1' is a NoneType"),
        ({"f1": torch.zeros((), dtype=torch.complex64)}, "'f1' is of torch.complex64"),
        ({1: torch.zeros(())}, "1 is of torch.float32"),
        *(
            ({name: torch.zeros(())}, f"is called '{name}'")
            for name in ("loss", "step", "lr", "lr_head", "norm", "step_seconds", "eval_f1", " ")
        ),
    ],
)
def test_what_is_no_metric_or_would_hide_a_column_is_told(metrics: dict[Any, Any], message: str) -> None:
    with pytest.raises(WordsError, match=f"objective Counting: its metric {message}"):
        loss_of(Counting(metrics), None, {})


@pytest.mark.parametrize("name", ["loss", "step", "lr", "eval_loss", ""])
def test_a_figure_hides_no_column(name: str) -> None:
    class Odd(Classification):
        def figures(self, sums: Any, count: float) -> Any:
            return {name: 1.0}

    with pytest.raises(WordsError, match="a name that dtrain uses itself"):
        figures(Odd(), {"loss": []}, [1.0], 10)


def test_a_figure_is_held_out_by_its_place_and_not_by_its_name() -> None:
    class Odd(Classification):
        def figures(self, sums: Any, count: float) -> Any:
            return {"eval_f1": 0.5}

    assert figures(Odd(), {"loss": []}, [1.0], 1) == {"loss": 1.0, "f1": 0.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("_target_=wrong_parts.OnOneRank strategy=ddp devices=2", "on all ranks: seldom"),
        ("_target_=wrong_parts.InSomeBatches devices=1 microbatch=4", "in all batches: seldom missing and"),
        (
            "_target_=wrong_parts.InSomeBatches strategy=ddp devices=2 microbatch=4",
            "in all batches: seldom missing and",
        ),
    ],
)
def test_sums_that_are_not_the_same_everywhere_are_named(words: str, message: str, tmp_path: Path) -> None:
    """Summed as they come, they would be added to others, or end a collective."""
    plan = plan_of(tmp_path / "run", *WORDS, *OWN[1:], "trust=[wrong_parts]", *f"objective.{words}".split())
    with pytest.raises(RankFailed, match=f"names or shapes of its sums are not the same {message}"):
        resident(plan.world, train, plan)


def test_a_loss_of_the_model_that_is_called_loss_stands_beside_ours() -> None:
    ours, theirs = torch.tensor(8.0), torch.tensor(2.0)
    total = add_losses(Loss(ours), {"loss": theirs}, {"loss": 0.5}, 4)
    assert total.sum == 12.0 and total.metrics == {"model_loss": 8.0}
    assert figures(NextToken(losses={"loss": 0.5}), {"loss": [], "model_loss": []}, [12.0, 8.0], 4)[
        "perplexity"
    ] == pytest.approx(math.exp(2.0))


def test_perplexity_is_of_the_cross_entropy_alone() -> None:
    objective = NextToken(losses={"aux_loss": 0.5})
    values = figures(objective, {"loss": [], "aux_loss": []}, [8.0, 4.0], 3)
    assert values == {"loss": 8 / 3, "aux_loss": 4 / 3, "perplexity": pytest.approx(math.exp(2.0))}
    assert math.isfinite(figures(NextToken(), {"loss": []}, [1e9], 1)["perplexity"])
    assert math.isnan(figures(NextToken(), {"loss": []}, [math.nan], 1)["perplexity"])


def test_what_a_hook_returns_is_a_figure_of_rows_best_and_result(tmp_path: Path) -> None:
    """On the first rank alone, at steps of its own; it cannot bend what the evaluation measures."""
    plan = plan_of(
        tmp_path / "run", *WORDS, "objective=classification", "steps=5", "evaluate.every=3", "checkpoint.every=1", "checkpoint.keep=1",
        "checkpoint.best=eval_weight", "hook.mine._target_=right_models.Weighed", "devices=2", "strategy=ddp",
    )  # fmt: skip
    assert plan.checkpoint["best_is"] == "highest"
    result = resident(2, train, plan)[0]
    assert result.metrics["eval_weight"] == 50 and result.metrics["eval_loss"] > 0
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("weight")) for row in rows] == [(1, None), (2, 20), (3, None), (4, 40), (5, 50)]
    evaluations = [
        (event["step"], sorted(key for key in event if key.startswith("eval_")))
        for event in events
        if event["event"] == "evaluated"
    ]
    assert evaluations == [
        (2, ["eval_weight"]),
        (3, ["eval_accuracy", "eval_loss"]),
        (4, ["eval_weight"]),
        (5, ["eval_accuracy", "eval_loss"]),
        (5, ["eval_weight"]),
    ]
    assert [event["text"] for event in events if event["event"] == "caveat" and "hook" in event["text"]] == [
        "a hook returns eval_loss, which is a metric of the evaluation: the value of the hook is ignored. Give it another name."
    ]
    (tmp_path / "run" / "plan.yaml").write_text(plan.document())
    (tmp_path / "run" / "config.yaml").write_text("steps: 5\n")
    (run,) = below(str(tmp_path))
    assert run.figures == pytest.approx(result.metrics) and directions([run])["eval_weight"] == "highest"


@pytest.mark.parametrize("name", ["loss", "lr_head", "mfu", "accuracy", "heavy"])
def test_a_number_of_a_hook_is_refused_the_name_of_a_column(name: str, tmp_path: Path) -> None:
    first, second = (f"hook.{each}._target_=right_models.Says" for each in ("first", "second"))
    words = (*WORDS, "objective=classification", first, "hook.first.name=heavy", second, f"hook.second.name={name}")
    with pytest.raises(RankFailed, match=f"hook Says returned {name}, which is a column of metrics.jsonl already"):
        resident(1, train, plan_of(tmp_path / "run", *words))


def test_the_figures_of_own_classes_are_known_before_launch(tmp_path: Path) -> None:
    assert plan_of(tmp_path, *WORDS, *OWN, "checkpoint.best=eval_f1").checkpoint["best_is"] == "highest"
    with pytest.raises(
        WordsError,
        match=r"checkpoint.best=eval_f2: the evaluation of this run has no such figure\. Did you mean eval_f1\?",
    ):
        plan_of(tmp_path, *WORDS, *OWN, "checkpoint.best=eval_f2")
