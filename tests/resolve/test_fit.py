"""Words of different groups fit together, or are refused before launch."""

import re

import pytest
from small import plan

from dtrain.errors import WordsError

MASKED = (
    "objective=masked",
    "data=text",
    "data.tokenizer=t.json",
    "model=hf",
    "model.task=masked_lm",
    "model.name=x",
    "model.weights=random",
)
DATASET = ("data=dataset", "data.dataset._target_=mine.Faces", "trust=[mine]")


@pytest.mark.parametrize(
    ("words", "objective"),
    [
        ((), "next_token"),
        (("data=synthetic",), "next_token"),
        (("data=synthetic", "model=mlp"), "regression"),
        (("data=synthetic", "model=cnn"), "classification"),
        (("data=synthetic", "model=mlp", "objective=classification"), "classification"),
        (DATASET, "next_token"),
        ((*DATASET, "model=cnn"), "classification"),
        ((*DATASET, "model=mlp"), "classification"),
    ],
)
def test_auto_is_the_objective_that_fits(words: tuple[str, ...], objective: str) -> None:
    assert plan(*words).objective["_target_"].split(".")[2] == objective


def test_synthetic_data_is_told_what_the_run_wants() -> None:
    assert plan("data=synthetic", "model=cnn").data["inputs"] == [1, 8, 8]
    assert plan("data=synthetic", "model=mlp").data["task"] == "regression"
    assert plan("data=synthetic").data["task"] == "next_token"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=mlp",), "Type model=gpt, or data=synthetic"),
        (("model=cnn", "data=tokens", "data.path=x"), "data=tokens gives tokens"),
        (("model=mlp", "data=synthetic", "objective=next_token"), "Type model=gpt, or objective=classification"),
        (("data=synthetic", "objective=regression"), "Type objective=next_token"),
        (("objective=classification",), "objective=classification"),
        (("objective=regression",), "objective=regression"),
        (("data=synthetic", "data.task=sorting"), "data.task=sorting"),
        (("data=synthetic", "model=mlp", "data.task=next_token"), "data.task"),
        (("data=synthetic", "hook=[sample]"), "hook=[]"),
        ((*MASKED, "hook=[sample]"), "continues no text. Type hook=[]."),
    ],
)
def test_what_does_not_fit_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*words)
    assert message in str(caught.value)


def test_text_is_sampled_and_other_data_is_not() -> None:
    assert list(plan().hooks) == ["sample"]
    assert plan("data=synthetic").hooks == {}
    assert plan("hook=[]").hooks == {}
    assert plan(*MASKED).hooks == {}  # its model reads both directions


CLASSES = ("data=synthetic", "model=mlp", "objective=classification")
OWN = ("data=synthetic", "model=mlp", "objective._target_=right_models.Huber", "trust=[right_models]")
DERIVED = (
    "data=synthetic",
    "data.task=classification",
    "model=mlp",
    "objective._target_=right_models.F1",
    "trust=[right_models]",
)
"""Of a word's class, whose figures it has too."""


def test_an_objective_of_your_own_has_its_name_in_messages() -> None:
    rows = ("data=jsonl", "data.path=x.jsonl", "data.targets=y", "model=mlp", "data.shift=true")
    with pytest.raises(WordsError, match=r"but objective=right_models\.F1 predicts none") as caught:
        plan(*rows, "objective._target_=right_models.F1", "trust=[right_models]")
    assert "objective: default" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "best_is"),
    [
        ((*CLASSES, "checkpoint.best=eval_loss"), "lowest"),
        ((*CLASSES, "checkpoint.best=eval_accuracy"), "highest"),
        ((*CLASSES, "checkpoint.best=eval_ema_accuracy", "ema=0.9"), "highest"),
        (
            (
                *CLASSES,
                "checkpoint.best=eval_ema_dev_accuracy",
                "ema=0.9",
                "data.holdout_part=0",
                "evaluate.sets={dev: {seed: 2}}",
            ),
            "highest",
        ),
        ((*OWN, "checkpoint.best=eval_f1", "checkpoint.best_is=highest"), "highest"),
        ((*OWN, "checkpoint.best=eval_loss"), "lowest"),
        ((*DERIVED, "checkpoint.best=eval_f1"), "highest"),
        ((*DERIVED, "checkpoint.best=eval_accuracy"), "highest"),
    ],
)
def test_the_best_is_the_lowest_loss_and_the_highest_accuracy(words: tuple[str, ...], best_is: str) -> None:
    assert plan(*words).checkpoint["best_is"] == best_is


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("checkpoint.best=eval_los",), "Did you mean eval_loss?"),
        (("checkpoint.best=eval_accuracy",), "no such figure."),
        ((*CLASSES, "checkpoint.best=eval_ema_accuracy"), "no such figure."),
        (
            (*CLASSES, "checkpoint.best=eval_accuracy", "checkpoint.best_is=lowest"),
            "of eval_accuracy the highest is the best",
        ),
        ((*DERIVED, "checkpoint.best=eval_f2"), "Did you mean eval_f1?"),
        ((*OWN, "checkpoint.best=eval_f1"), "Type checkpoint.best_is=lowest or highest."),
        (("checkpoint.best_is=lowest",), "nothing in this run reads it"),
        (
            ("checkpoint.best=eval_loss", "data.holdout=0"),
            "nothing is held out to measure it on. Type data.holdout=0.1.",
        ),
        ((*CLASSES, "checkpoint.best=eval_accuracy", "data.holdout_part=0"), "Type data.holdout_part=0.1."),
        (
            (*CLASSES, "checkpoint.best=eval_accuracy", "data.holdout_part=0", "evaluate.sets={dev: {seed: 2}}"),
            "Type checkpoint.best=eval_dev_accuracy.",
        ),
        (
            (
                *CLASSES,
                "checkpoint.best=eval_ema_loss",
                "ema=0.9",
                "data.holdout_part=0",
                "evaluate.sets={dev: {seed: 2}}",
            ),
            "Type checkpoint.best=eval_ema_dev_loss.",
        ),
    ],
)
def test_a_best_that_nobody_knows_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*words)
    assert message in str(caught.value)
    assert len(caught.value.problems) == 1


HF = ("model=hf", "model.name=x", "data=synthetic")


@pytest.mark.parametrize(
    ("words", "objective", "task"),
    [
        ((), "next_token", "next_token"),
        (("model.weights=random", "objective=own"), "own", "next_token"),
        (("model.task=image_classification", "data.inputs=[3,32,32]"), "classification", "classification"),
    ],
)
def test_synthetic_data_is_what_a_model_of_this_task_reads(words: tuple[str, ...], objective: str, task: str) -> None:
    decided = plan(*HF, *words)
    assert (decided.objective["_target_"].split(".")[2], decided.data["task"]) == (objective, task)


SEQ2SEQ = "model=hf", "model.name=x", "model.weights=random", "model.task=seq2seq", "data=jsonl", "data.path=x.jsonl"


def test_a_decoder_without_an_input_is_told_with_what_to_type() -> None:
    words = (*SEQ2SEQ, "data.targets=labels")
    with pytest.raises(WordsError) as error:
        plan(*words, "objective=next_token", "data.inputs=[input_ids]")
    (told,) = [each for each in error.value.problems if "seq2seq" in each]
    assert "model.task=seq2seq objective=next_token: nothing in the data is the input of the decoder" in told
    assert "Type objective=own, with which" in told and "data.inputs=[input_ids,decoder_input_ids]." in told
    plan(*words, "objective=own", "data.inputs=[input_ids]")
    plan(*words, "data.inputs=[input_ids,decoder_input_ids]")


def test_a_shift_that_no_target_has_is_told_beside_other_mistakes() -> None:
    words = "model=mlp", "data=jsonl", "data.path=x.jsonl", "data.targets=y", "objective=regression", "data.shift=true"
    with pytest.raises(WordsError) as error:
        plan(*words, "objective.together=4")
    assert any("data.shift=true makes the next token the target" in each for each in error.value.problems)
    assert any("objective.together=4: nothing in this run reads it" in each for each in error.value.problems)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model.task=masked_lm",), "objective=masked data=text"),
        (("model.task=classification",), "makes no text with such targets. Type data=jsonl"),
        (("model.task=classification", "objective=classification"), "makes no text with such targets"),
        (("model.task=seq2seq",), "makes no text with such targets"),
        (("objective=regression",), "makes no text with such targets"),
        (("model.task=image_classification",), "Type data.inputs=[3,224,224], with that size"),
    ],
)
def test_a_task_that_synthetic_data_does_not_have_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError, match=re.escape(message)):
        plan(*HF, *words)
