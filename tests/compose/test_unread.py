"""Values that nobody can mean, each answered with a sentence about it and never with a fault of dtrain."""

import pytest

from dtrain.__main__ import main
from dtrain.testing.faults import AtStep

DIGITS = "9" * 400


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["steps=${"], "steps='${' (command line): ${ begins a reference"), (["model.layers=${x"], "${ begins a reference"), (["data.path=a${b:"], "${ begins a reference"),
        (["evaluate.metrics.0._target_=my.F1"], "Type 'evaluate.metrics=[{_target_:my.F1}]', with all items."),
        (["data.path.1=b"], "Type data.path=[b], with all items."),
        (["model._target_=my.Net", "model.of=[{_target_:my.A}]", "model.of.0.size=3"], "model.of (command line) is a list, which is typed whole: model.of=[...]."),
        (["steps.x=1"], "steps holds no other words, it is an integer >= 1, in steps. Type steps=<value>."),
        (["max_new_tokens=5"], "there is no word max_new_tokens. Did you mean generate.tokens=5?"),
        (["steps=1e3"], "steps=1e3 (command line): steps is an integer >= 1, in steps. Type steps=1000."),
        (["generate.prompt=${", "seed=x"], "seed is an integer"), (["loop=null"], "loop is text"), (["loop=[]"], "loop is text"), (["loop={a:1}"], "loop is text"),
        ([f"seed={DIGITS}"], "seed is an integer"), ([f"optim.lr={DIGITS}"], "optim.lr is a number"), ([f"optim.betas=[{DIGITS},0.9]"], "optim.betas is"), ([f"evaluate.every=-{DIGITS}"], "evaluate.every"),
        ([f"data.holdout={DIGITS}.5"], "data.holdout"), ([f"time_limit={DIGITS}"], "time_limit"), ([f"clip={DIGITS}"], "clip"), (["model.layers=1000000"], "model.layers is an integer >= 1 and <= 5000"),
        ([f"microbatch={DIGITS}"], "microbatch"), ([f"checkpoint.keep={DIGITS}"], "checkpoint.keep"), ([f"mesh.tp={DIGITS}"], "mesh.tp"), ([f"expect.loss=[0,{DIGITS}]"], "expect.loss"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_one_sentence_says_what_is_wrong(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "fault of dtrain" not in printed


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("steps", "Type steps=<value>."),
        ("steps:", "Type steps=<value>."),
        ("optim.lr", "Type optim.lr=<value>."),
        ("optim", "Type optim=<value>."),
        ("mesh", "Type mesh.<name>=<value>."),
        ("steps: 5", "Type steps=5."),
        ("fsdp", "Type strategy=fsdp."),
    ],
)
def test_a_word_without_a_value_is_answered_with_the_word_to_type(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", word]) == 2
    assert (
        f"{word} (command line): neither a verb nor a word. Words look like key=value. {hint}\n"
        in capsys.readouterr().err
    )


def test_a_verb_behind_a_word_is_answered_with_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=mlp", "plan"]) == 2
    printed = capsys.readouterr().err
    assert "plan (command line): a verb comes before all words. Type dtrain plan, then key=value.\n" in printed


@pytest.mark.parametrize("action", [float("nan"), None, "", "errorcode", "__name__", "nan"])
def test_a_fault_that_is_none_is_refused_when_it_is_built(action: str) -> None:
    with pytest.raises(ValueError, match="there is no fault"):
        AtStep(action=action, step=1)
