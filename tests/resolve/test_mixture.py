"""The sources of a mixture are checked as one alone would be, and all mistakes are told at once."""

from pathlib import Path

import pytest
from small import plan

from dtrain.config.facts import about
from dtrain.errors import WordsError

TWO = ("data=mixture", "data.of={a: {data: text}, b: {data: text, path: x.txt}}", "data.weights={a: 0.7, b: 0.3}")


def test_a_source_is_its_word_with_what_was_typed() -> None:
    made = plan(*TWO, "data.sequence=32")
    a, b = made.data["of"].values()
    assert a["_target_"] == "dtrain.data.text.build" and (a["path"], b["path"]) == ("stdlib", "x.txt")
    assert a["sequence"] == b["sequence"] == made.data["sequence"] == 32 and made.data["tokenizer"] == "bytes"
    assert (about(made.data)["gives"], about(made.data)["text"], about(made.data)["loading"]) == (
        "tokens",
        True,
        "thread",
    )
    assert made.objective["_target_"].endswith("NextToken") and "sample" in made.hooks


def test_arguments_can_be_typed_one_by_one() -> None:
    words = ("data.of.a.data=synthetic", "data.of.a.task=classification", "data.of.a.inputs=[4]", "data.weights.a=1")
    made = plan("data=mixture", *words, "model=mlp")
    assert made.data["of"]["a"]["inputs"] == [4] and made.objective["_target_"].endswith("Classification")


def test_facts_of_the_sources_are_in_no_plan() -> None:
    assert "_about_" not in plan(*TWO).document()


@pytest.mark.parametrize(
    ("of", "weights", "problems"),
    [
        ("{}", "{}", ["data.of names no source"]),
        ("{a: {data: txt}, b: {path: y}, c: text}", "{a: 1, b: 1}", [
            "data.of.a.data=txt: there is no such source for a mixture. Did you mean text?",
            "data.of.b does not say which data it is",
            "data.of.c does not say which data it is",
            "data.weights gives c no weight. Type 'data.weights={a: 1, b: 1, c: 1}'",
        ]),
        ("{a: {data: text, pth: x}, b: {data: tokens}, c: {data: text, holdout: 2}}", "{a: 1, b: 1, c: 1}", [
            "data.of.a.pth: data=text has no pth. Did you mean path?",
            "data.of.b: data=tokens needs path",
            "data.of.c.holdout=2",
        ]),
        ("{a: {data: text}, b: {data: text}, c: {data: text}}", "{a: 0, b: -1, c: 1, d: 3}", [
            "data.weights.d: data.of has no d",
            "data.weights.a=0: a weight is a number above 0",
            "data.weights.b=-1: a weight is a number above 0",
        ]),
        ("{a: {data: text}, b: {data: text}}", "{a: 1, b: 1e-9}", ["data.weights.b=1e-09 is less than 1e-05 of all"]),
        ("{a: {data: text}, b: {data: text, sequence: 32}}", "{a: 1, b: 1}", ["different values of sequence (a 64, b 32)"]),
        ("{a: {data: text}, b: {data: synthetic, task: regression, inputs: [3]}}", "{a: 1, b: 1}", ["a gives tokens, b gives samples"]),
        ("{a: {data: mixture}}", "{a: 1}", ["there is no such source for a mixture"]),
        ("{a: {data: jsonl, path: x, targets: y, pad: 0}}", "{a: 1}", ["data.of.a.pad: rows of several sources need one length"]),
    ],
)  # fmt: skip
def test_mistakes_are_told_together(of: str, weights: str, problems: list[str]) -> None:
    with pytest.raises(WordsError) as error:
        plan("data=mixture", f"data.of={of}", f"data.weights={weights}", "optim.lr=-1")
    *told, last = error.value.problems
    assert len(told) == len(problems) and last.startswith("optim.lr=-1")
    assert all(problem in sentence for problem, sentence in zip(problems, told, strict=True)), told


def test_files_of_each_source_are_looked_at_before_launch(tmp_path: Path) -> None:
    from dtrain.launcher import preflight

    (tmp_path / "a.jsonl").write_text('{"x": 1, "y": 2}\n')
    of = f"data.of={{a: {{data: jsonl, path: {tmp_path}/a.jsonl, targets: z}}, b: {{data: csv, path: {tmp_path}/none.csv, targets: y}}}}"
    made = plan(
        "data=mixture", of, "data.weights={a: 1, b: 1}", "model=mlp", "objective=regression", f"out={tmp_path}/run"
    )
    assert preflight.missing(made) == [
        f"data.of.a.path={tmp_path}/a.jsonl has no column z. Allowed: x, y.", f"data.of.b.path={tmp_path}/none.csv: no file is there."
    ]  # fmt: skip
