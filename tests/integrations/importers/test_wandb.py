"""W&B's sweeps: every parameter is swept as W&B would, or refused with a reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from imported import FILES, example

from dtrain.cluster import Cluster
from dtrain.integrations.importers import complete, translate
from dtrain.integrations.importers.ledger import Ledger
from dtrain.integrations.importers.write import command, recipe
from dtrain.resolve import resolve
from dtrain.sweep import jobs
from dtrain.sweep.space import Choices, Interval

RUN = ["model=mlp", "data=synthetic", "data.outputs=10", "objective=classification"]


def ledger_of(tree: dict[str, Any]) -> Ledger:
    ledger = translate(tree, "wandb", "sweep.yaml")
    complete(ledger)
    return ledger


def swept(name: str, spec: dict[str, Any], method: str = "random") -> Any:
    ledger = ledger_of({"method": method, "run_cap": 5, "parameters": {name: spec}})
    (value,) = [ledger.words[word] for word in ledger.words if word.startswith("sweep.space.")] or [None]
    return value


@pytest.mark.parametrize("name", ["wandb_bayes.yaml", "wandb_grid.yaml"])
def test_the_jobs_of_an_example_are_judged(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(example(name).recipe)
    more = [*RUN, *(["sweep.metric=eval_loss", "sweep.goal=min"] if "bayes" in name else ["epochs=null"])]
    request = jobs.read([f"recipe={tmp_path}/mine.yaml", "sweep.out=s", *more])
    judged = jobs.judged(request, Cluster(0, 2), resolve)
    space = {axis.key: axis for axis in request.space}
    if "bayes" in name:
        assert (judged.study.method, judged.study.trials, judged.config.seed) == ("tpe", 50, 7)
        assert space["optim.lr"] == Interval("optim.lr", 1e-5, 0.1, log=True, whole=False)
        assert space["batch"] == Interval("batch", 32, 256, log=True, whole=True)
        assert space["optim"] == Choices("optim", ("adamw", "sgd"))
    else:
        assert (judged.study.metrics, judged.study.goals) == (("eval_accuracy",), ("max",))
        assert len(judged.jobs) == 3 * 4 * 2


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ({"values": [1, 2.5]}, [1, 2.5]),
        ({"min": 0.1, "max": 1}, "interval(0.1,1.0)"),
        ({"min": 1, "max": 8, "distribution": "uniform"}, "interval(1.0,8.0)"),
        ({"min": 1, "max": 8}, "int(interval(1,8))"),
        ({"min": "1e-5", "max": "1e-1", "distribution": "log_uniform_values"}, "tag(log,interval(1e-05,0.1))"),
        ({"min": 0, "max": 1, "distribution": "log_uniform"}, f"tag(log,interval(1.0,{2.718281828459045}))"),
        ({"min": 0, "max": 0.3, "q": 0.1, "distribution": "q_uniform"}, [0.0, 0.1, 0.2, 0.3]),
        ({"min": 3, "max": 9, "q": 2, "distribution": "q_uniform"}, [4, 6, 8]),
    ],
)
def test_a_distribution_is_drawn_from_as_there(spec: dict[str, Any], value: object) -> None:
    assert swept("learning_rate", spec) == value


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"distribution": "normal", "mu": 0, "sigma": 1}, "does not draw from the distribution normal"),
        ({"values": []}, "a list of values is missing"),
        ({"min": 1}, "neither values, nor a value, nor min and max"),
        ({"min": "a", "max": 1}, "min is a number"),
        ({"min": 2, "max": 1}, "min is 2, which is not less than max, 1"),
        ({"min": 1.0, "max": 1.0}, "not less than max"),
        ({"min": 0, "max": 1, "distribution": "log_uniform_values"}, "its logarithm is drawn"),
        ({"min": 1.2, "max": 1.8, "distribution": "int_uniform"}, "no two integers"),
        ({"min": 0, "max": 1e9, "q": 1, "distribution": "q_uniform"}, "more than 200"),
        ({"min": 0, "max": 900, "distribution": "log_uniform"}, "exponents of e"),
        ({"values": ["${oc.env:HOME}"]}, "a reference"),
        ({"values": [{"a": 1}]}, "neither values, nor a value, nor min and max"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_every_key(spec: dict[str, Any], why: str) -> None:
    ledger = ledger_of({"method": "random", "run_cap": 5, "parameters": {"learning_rate": spec}})
    entries = [entry for entry in ledger.entries if entry.key.startswith("parameters.")]
    assert entries and {entry.kind for entry in entries} == {"refused"} and why in entries[0].why
    assert not any(word.startswith("sweep.space") for word in ledger.words)


def test_hyperband_is_halving() -> None:
    carried = example("wandb_bayes.yaml").told("carried")
    assert (
        carried["early_terminate.type"] == "sweep.stop=halving" and carried["early_terminate.eta"] == "sweep.factor=3"
    )
    other = ledger_of({"method": "grid", "early_terminate": {"type": "mine", "eta": 2}, "parameters": {}})
    assert {entry.key for entry in other.of("refused")} >= {"early_terminate.type", "early_terminate.eta"}
    assert "sweep.factor" not in other.words


def test_a_grid_has_no_intervals() -> None:
    assert swept("seed", {"min": 0, "max": 3}, "grid") == "range(0,4)"
    assert swept("learning_rate", {"min": 0.0, "max": 3.0}, "grid") is None


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("learning_rate", "optim.lr"), ("lr", "optim.lr"), ("optim.lr", "optim.lr"), ("batch_size", "batch"),
        ("hidden_size", "model.width"), ("weight_decay", "optim.weight_decay"), ("epochs", "epochs"),
        ("model.depth", "model.depth"), ("model.my_own", "model.my_own"), ("my_own", ""), ("output_dir", ""), ("config", ""), ("trust", ""), ("every", ""),
    ],
)  # fmt: skip
def test_a_parameter_is_known_by_its_name(name: str, word: str) -> None:
    ledger = ledger_of({"method": "random", "run_cap": 5, "parameters": {name: {"values": [1, 2]}}})
    assert [key for key in ledger.words if key.startswith("sweep.space.")] == [f"sweep.space.{word}"] * bool(word)


def test_parameters_inside_another_and_words_of_groups() -> None:
    tree = {
        "optimizer": {"parameters": {"lr": {"values": [0.1, 0.2]}, "name": {"values": ["adam"]}}},
        "optim": {"values": ["adam", "sgd"]},
        "momentum": {"value": 0.9},
        "schedule": {"values": ["cosine", "exponential"]},
    }
    ledger = ledger_of({"method": "grid", "parameters": tree})
    space = {word: value for word, value in ledger.words.items() if word.startswith("sweep.space")}
    assert space == {
        "sweep.space.optim": ["adamw", "sgd"], "sweep.space.optim.lr": [0.1, 0.2], "sweep.space.optim.momentum": 0.9,
    }  # fmt: skip
    assert yaml.safe_load(recipe(ledger, (), "x"))["sweep"]["space"]["optim.lr"] == [0.1, 0.2]
    refused = {entry.key: entry.why for entry in ledger.of("refused")}
    assert "there is no schedule exponential" in refused["parameters.schedule.values"]


def test_an_argument_that_no_word_of_the_sweep_takes_is_refused() -> None:
    ledger = ledger_of({"method": "grid", "parameters": {"momentum": {"values": [0.8, 0.9]}}})
    (entry,) = [entry for entry in ledger.entries if entry.key.startswith("parameters")]
    assert entry.kind == "refused" and "optim.momentum=0.8,0.9 with -m" in entry.why


def test_what_a_search_needs_and_the_file_lacks_is_asked_for() -> None:
    ledger = ledger_of({"method": "bayes", "metric": {"name": "f1"}, "parameters": {"lr": {"values": [1, 2]}}})
    typed = command(ledger, "mine.yaml")
    assert typed.startswith("dtrain -m recipe=mine.yaml")
    assert "sweep.metric=<" in typed and "sweep.trials=<" in typed
    assert "???" not in recipe(ledger, (), "mine.yaml").partition("defaults:")[2]


def test_a_model_that_is_searched_for_is_not_asked_for() -> None:
    ledger = ledger_of({"method": "grid", "parameters": {"model": {"values": ["gpt", "moe"]}, "lr": {"value": 0.1}}})
    complete(ledger, ("model", "data"))
    assert "model" not in ledger.words and ledger.words["data"] == "???"


def test_flags_of_the_command_are_not_lost() -> None:
    why = example("wandb_bayes.yaml").told("refused")["command"]
    assert why.endswith("the same as --epochs=10.")
    assert "command" in example("wandb_grid.yaml").told("unneeded")
    assert (FILES / "wandb_grid.yaml").exists()
