"""Data beside that of the run: other arguments, other words, and what is best of its figures."""

import pytest
from small import plan

from dtrain.errors import WordsError

ROWS = ("model=mlp", "data=csv", "data.path=a.csv", "data.targets=y", "objective=classification")


def test_a_set_is_the_data_of_the_run_with_other_arguments() -> None:
    made = plan(*ROWS, "evaluate.sets={dev: {path: b.csv}, other: {data.path: c.csv, data.separator: tab}}")
    assert [part["path"] for part in made.evaluate_sets.values()] == ["b.csv", "c.csv"]
    assert made.evaluate_sets["dev"]["targets"] == "y" and made.evaluate_sets["other"]["separator"] == "tab"
    assert made.evaluate_sets["dev"]["holdout"] == 0, "all of it is evaluated"
    assert made.data["path"] == "a.csv" and made.data["holdout"] == 0.1


def test_a_set_may_be_another_word() -> None:
    made = plan(*ROWS, "evaluate.sets={dev: {data: jsonl, path: b.jsonl, targets: y}}", "predict.data={path: n.csv}")
    assert made.evaluate_sets["dev"]["_target_"] == "dtrain.data.jsonl.build"
    assert made.predict["data"]["path"] == "n.csv" and made.predict["data"]["holdout"] == 0


def test_its_figures_are_known() -> None:
    made = plan(
        *ROWS, "data.holdout=0", "evaluate.sets={dev: {path: b.csv}}", "evaluate.metrics=[f1]",
        "checkpoint.best=eval_dev_f1", "stop.metric=eval_dev_loss",
    )  # fmt: skip
    assert made.checkpoint["best_is"] == "highest" and made.stop["is_best"] == "lowest"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("evaluate.sets={dev: {pth: b.csv}}", "evaluate.sets.dev.pth: data=csv has no pth. Did you mean path?"),
        ("evaluate.sets={dev: {holdout: 0.5}}", "data=csv has no holdout"),
        ("evaluate.sets={dev: {data: cvs, path: b}}", "there is no such data. Did you mean csv?"),
        ("evaluate.sets={dev: {data: jsonl, path: b}}", "evaluate.sets.dev: data=jsonl needs targets"),
        ("evaluate.sets={dev: {path: 3}}", "evaluate.sets.dev.path=3 (command line): "),
        ("evaluate.sets={dev: b.csv}", "name what is other than in `data`"),
        ("evaluate.sets={ema: {path: b.csv}}", "Type another name"),
        ("evaluate.sets={Dev-1: {path: b.csv}}", "a set is named by small letters, digits and _, a letter first"),
        ("evaluate.sets={a b: {path: b.csv}}", "evaluate.sets.a b: a set is named by small letters, digits and _"),
        ("evaluate.sets={ema: {path: b.csv}}", "eval_ema_... is a figure of the run already"),
        ("evaluate.sets={dev: {separator: colon}}", "evaluate.sets.dev.separator is comma, semicolon, tab or pipe"),
        ("predict.data={pth: b.csv}", "predict.data.pth: data=csv has no pth"),
    ],
)
def test_what_cannot_be_is_refused(word: str, said: str) -> None:
    with pytest.raises(WordsError) as error:
        plan(*ROWS, word)
    assert said in str(error.value)
