"""epochs are the steps of so many passes, known before launch or asked for."""

import math
from pathlib import Path

import pytest
from chat import talks
from small import plan

from dtrain.build import build
from dtrain.errors import WordsError

WORDS = ("model=mlp", "data=synthetic", "objective=regression", "data.samples=1000")
OWN = ("model=mlp", "data=dataset", "data.dataset._target_=faces.Faces", "objective=regression", "trust=[faces]")


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (("epochs=3",), 375),
        (("epochs=0.5",), 63),
        (("epochs=3", "batch=7"), 429),
        (("epochs=1", "microbatch=2", "accumulate=5"), 100),
    ],
)
def test_steps_follow_from_the_length_and_the_batch(words: tuple[str, ...], steps: int) -> None:
    assert plan(*WORDS, *words).steps == steps


@pytest.mark.parametrize(("words", "steps"), [((), 12), (("data.holdout=0",), 13), (("data.holdout=0.5",), 7)])
def test_a_dataset_that_states_its_length_is_known_without_what_is_held_out(
    words: tuple[str, ...], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faces.py").write_text(
        "raise RuntimeError('it ran')\nclass Faces:\n    about = {'inputs': [4], 'samples': 101}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert plan(*OWN, *words, "epochs=1").steps == steps


def test_what_is_not_known_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        WordsError,
        match=r"epochs=3: data=text does not say before launch how many samples it has. Type steps=<3 x its training samples / 8>",
    ):
        plan("epochs=3")
    (tmp_path / "faces.py").write_text("class Faces:\n    about = {'inputs': [4]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        WordsError,
        match=r"Type steps=<3 x its training samples / 8>, or give the class of the dataset about = \{'samples': <its length>\}\.",
    ):
        plan(*OWN, "epochs=3")


def test_both_are_one_too_many_and_what_is_typed_goes_before_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(WordsError, match=r"epochs=3 and steps=9 both set the length of the run"):
        plan(*WORDS, "epochs=3", "steps=9")
    (tmp_path / "a.yaml").write_text("epochs: 3\nsteps: 1000\n")
    assert plan(f"recipe={tmp_path}/a.yaml", *WORDS).steps == 375, "as the config.yaml of a run has both"
    assert plan(f"recipe={tmp_path}/a.yaml", *WORDS, "steps=9").steps == 9


def test_the_rules_of_length_count_those_steps() -> None:
    with pytest.raises(WordsError, match=r"stop_after=400 is never reached: steps=375"):
        plan(*WORDS, "epochs=3", "stop_after=400")


def test_conversations_are_counted_as_the_run_has_them(tmp_path: Path) -> None:
    talks.tokenizer(tmp_path / "tk")
    rows = talks.write(tmp_path / "rows.jsonl", talks.talks())
    words = (
        "data=chat",
        f"data.path={rows}",
        f"data.tokenizer={tmp_path}/tk",
        f"data.cache={tmp_path}/cache",
        "batch=2",
    )
    for more in ((), ("data.holdout=0",), ("data.holdout=0.5",)):
        made = plan(*words, *more, "epochs=3")
        source = build(made.data)
        assert made.steps == math.ceil(3 * len(source) / 2) > 3
    with pytest.raises(WordsError, match=r"epochs=3: how many windows data.packing=pack fills .* Type steps=<3 x its"):
        plan(*words, "data.packing=pack", "epochs=3")
    with pytest.raises(WordsError, match=r"epochs=3: which rows data.long=skip leaves out .*, or data.long=cut\."):
        plan(*words, "data.long=skip", "epochs=3")
    with pytest.raises(WordsError, match=r"gone\.jsonl"):
        plan(*words, f"data.path={tmp_path}/gone.jsonl", "epochs=3")
