"""What the first step of a start shows is told: a forward that draws random numbers of which its modules say nothing; state that nobody saves."""

import json
from pathlib import Path

import pytest
from launching import plan_of
from pool import RankFailed, ranks

from dtrain.planned import Plan
from dtrain.train import train

WORDS = (
    "data=synthetic",
    "objective=regression",
    "steps=3",
    "devices=2",
    "strategy=ddp",
    "hook=[]",
    "trust=[wrong_models]",
    "evaluate.samples=8",
)


def told(plan: Plan) -> list[str]:
    ranks(plan.world, train, plan)
    return [
        event["text"]
        for event in map(json.loads, (Path(plan.out) / "events.jsonl").read_text().splitlines())
        if event["event"] == "caveat"
    ]


@pytest.mark.parametrize(
    ("name", "generator"), [("FunctionalDropout", "torch"), ("AttentionDropout", "torch"), ("NumpyNoise", "numpy")]
)
def test_functional_dropout_is_told_once(name: str, generator: str, tmp_path: Path) -> None:
    trained, evaluated = told(
        plan_of(tmp_path / "run", f"model._target_=wrong_models.{name}", *WORDS, "evaluate.every=1")
    )
    assert trained.startswith(f"the forward draws random numbers (of {generator})")
    assert evaluated.startswith(f"the model still draws random numbers in evaluation (of {generator})")


def test_a_dropout_module_is_told_before_the_first_step_alone(tmp_path: Path) -> None:
    (sentence,) = told(plan_of(tmp_path / "run", "model._target_=wrong_models.ModuleDropout", *WORDS))
    assert sentence.startswith("dropout draws other masks")


def test_a_forward_that_draws_nothing_is_not_told_of(tmp_path: Path) -> None:
    assert told(plan_of(tmp_path / "run", "model._target_=wrong_models.Net", *WORDS)) == []


@pytest.mark.parametrize("words", [(), ("devices=1", "strategy=single"), ("stop_after=2",)])
def test_a_buffer_that_training_changes_and_nobody_saves_is_told_once(words: tuple[str, ...], tmp_path: Path) -> None:
    (sentence,) = told(plan_of(tmp_path / "run", "model._target_=wrong_models.ForgottenBuffer", *WORDS, *words))
    assert sentence.startswith("scale is a buffer with persistent=False that training changes")


def test_a_count_in_an_attribute_is_told_once(tmp_path: Path) -> None:
    (sentence,) = told(plan_of(tmp_path / "run", "model._target_=wrong_models.CountsCalls", *WORDS))
    assert sentence.startswith("calls is a number that every step changes, but it is not in the checkpoint")


def test_an_extra_state_is_told_before_the_first_step(tmp_path: Path) -> None:
    (sentence,) = told(plan_of(tmp_path / "run", "model._target_=wrong_models.Extra", *WORDS))
    assert sentence.startswith("Extra has an extra state (get_extra_state), which no checkpoint holds")


def test_a_parameter_that_comes_late_is_refused_before_a_checkpoint_that_nothing_could_load(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", "model._target_=wrong_models.Late", *WORDS, "devices=1", "strategy=single")
    with pytest.raises(RankFailed, match="the model gained or lost parameters or buffers while it trained: late"):
        ranks(1, train, plan)
    assert not list((tmp_path / "run").glob("checkpoints/*/*/COMMIT.json"))


def test_a_buffer_of_the_first_forward_is_refused_after_the_first_step(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", "model._target_=wrong_models.Lazy", *WORDS, "devices=1", "strategy=single")
    with pytest.raises(RankFailed, match="the model gained or lost parameters or buffers while it trained: scale"):
        ranks(1, train, plan)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) <= 1


def test_a_cache_that_nobody_saves_is_not_told_of(tmp_path: Path) -> None:
    assert told(plan_of(tmp_path / "run", "model._target_=wrong_models.Cached", *WORDS)) == []
