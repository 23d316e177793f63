"""What the first step of a start shows is told: a forward that draws random numbers of which its modules say nothing; state that nobody saves."""

import json
import re
from pathlib import Path

import commands
import pytest
from launching import plan_of
from pool import RankFailed, ranks
from small import plan

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


def caveats(plan: Plan) -> list[str]:
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
    trained, evaluated = caveats(
        plan_of(tmp_path / "run", f"model._target_=wrong_models.{name}", *WORDS, "evaluate.every=1")
    )
    assert trained.startswith(f"the forward draws random numbers (of {generator})")
    assert evaluated.startswith(f"the model still draws random numbers in evaluation (of {generator})")


def test_a_dropout_module_is_told_before_the_first_step_alone(tmp_path: Path) -> None:
    (sentence,) = caveats(plan_of(tmp_path / "run", "model._target_=wrong_models.ModuleDropout", *WORDS))
    assert sentence.startswith("dropout draws other masks")


def test_a_forward_that_draws_nothing_is_not_told_of(tmp_path: Path) -> None:
    assert caveats(plan_of(tmp_path / "run", "model._target_=wrong_models.Net", *WORDS)) == []


def test_remat_of_a_model_without_blocks_is_told(tmp_path: Path) -> None:
    words = ("model._target_=wrong_models.Net", "remat=full", *WORDS)
    assert [each.split(":")[0] for each in caveats(plan_of(tmp_path / "run", *words))] == ["remat changes nothing"]


def test_samples_that_are_read_after_the_forward_are_no_draws_of_it(tmp_path: Path) -> None:
    """The first save reads samples for the digest of the data, which seeds the generators."""
    data = ("data=dataset", "data.dataset._target_=small.Uneven", "trust=[small]", "checkpoint.every=1")
    model = (
        "model=gpt",
        "model.vocab=13",
        "model.layers=1",
        "model.width=16",
        "objective=next_token",
        "data.outputs=13",
    )
    assert caveats(plan(*data, *model, "batch=8", "steps=2", "logger=[]", f"out={tmp_path}/run")) == []


def test_draws_of_the_optimizer_are_no_draws_of_the_forward(tmp_path: Path) -> None:
    words = ("model._target_=wrong_models.Net", *WORDS, "optim._target_=wrong_models.RandomUpdate")
    assert caveats(plan_of(tmp_path / "run", *words)) == []


@pytest.mark.parametrize("words", [(), ("devices=1", "strategy=single"), ("stop_after=2",)])
def test_a_buffer_that_training_changes_and_nobody_saves_is_told_once(words: tuple[str, ...], tmp_path: Path) -> None:
    (sentence,) = caveats(plan_of(tmp_path / "run", "model._target_=wrong_models.ForgottenBuffer", *WORDS, *words))
    assert sentence.startswith("scale is a buffer with persistent=False that training changes")


def test_a_count_in_an_attribute_is_told_once(tmp_path: Path) -> None:
    (sentence,) = caveats(plan_of(tmp_path / "run", "model._target_=wrong_models.CountsCalls", *WORDS))
    assert sentence.startswith("calls is a number that every step changes, but it is not in the checkpoint")


def test_an_extra_state_is_told_before_the_first_step(tmp_path: Path) -> None:
    (sentence,) = caveats(plan_of(tmp_path / "run", "model._target_=wrong_models.Extra", *WORDS))
    assert sentence.startswith("Extra has an extra state (get_extra_state), which no checkpoint holds")


def test_a_parameter_that_comes_late_is_refused_before_a_checkpoint_that_nothing_could_load(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", "model._target_=wrong_models.Late", *WORDS, "devices=1", "strategy=single")
    with pytest.raises(RankFailed, match="the model gained or lost parameters or buffers while it trained: late"):
        ranks(1, train, plan)
    assert not list((tmp_path / "run").glob("checkpoints/*/*/COMMIT.json"))


def test_a_parameter_that_is_replaced_is_refused_as_the_optimizer_trains_the_old_one(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", "model._target_=wrong_models.Replaces", *WORDS, "devices=1", "strategy=single")
    with pytest.raises(RankFailed, match=r"the model replaced parameters while it trained: down\.weight"):
        ranks(1, train, plan)
    assert not list((tmp_path / "run").glob("checkpoints/*/*/COMMIT.json"))


def test_a_buffer_of_the_first_forward_is_refused_after_the_first_step(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "run", "model._target_=wrong_models.Lazy", *WORDS, "devices=1", "strategy=single")
    with pytest.raises(RankFailed, match="the model gained or lost parameters or buffers while it trained: scale"):
        ranks(1, train, plan)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) <= 1


def test_a_cache_that_nobody_saves_is_not_told_of(tmp_path: Path) -> None:
    assert caveats(plan_of(tmp_path / "run", "model._target_=wrong_models.Cached", *WORDS)) == []


def test_an_evaluation_that_a_signal_cut_short_is_made_up_for_and_told_with_its_step(tmp_path: Path) -> None:
    words = ["model._target_=sweeping.Trouble", "trust=[sweeping]", "data=synthetic", "data.inputs=[16]", "steps=9"]
    words += ["data.samples=64", "objective=classification", "evaluate.every=3", "hook=[]", "logger=[]"]
    trouble = ["model.how=terminated", f"model.once={tmp_path}/once"]
    calm = commands.run(*words, "model.how=none", "out=calm", cwd=tmp_path)
    assert calm.returncode == 0, calm.stderr
    stopped = commands.run(*words, *trouble, "out=run", cwd=tmp_path)
    assert stopped.returncode == 75 and "preempted after 3 steps" in stopped.stdout, stopped.stderr
    assert not evaluations(tmp_path / "run"), "nothing was cut short"
    (tmp_path / "once").unlink()
    stopped = commands.run(*words, *trouble, "out=run", cwd=tmp_path)
    assert stopped.returncode == 75 and "preempted after 5 steps" in stopped.stdout, stopped.stderr
    assert re.search(r"held-out loss [\d.]+ of step 3,", stopped.stdout)
    done = commands.run(*words, *trouble, "out=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "calm")


def evaluations(run: Path) -> list[tuple[int, float]]:
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [(event["step"], event["eval_loss"]) for event in events if event["event"] == "evaluated"]


def test_a_buffer_that_follows_the_samples_is_told_by_its_name(tmp_path: Path) -> None:
    words = ("model._target_=wrong_models.Codebook", *WORDS)
    (sentence,) = caveats(plan_of(tmp_path / "run", *words))
    assert sentence.startswith("codes: training changes these buffers.")
