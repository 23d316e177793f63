"""The same words come back to the same place, other words to another."""

import pytest
from small import plan

from dtrain.errors import WordsError


def out(*words: str) -> str:
    return plan(*words).out


def test_the_same_words_come_back_to_the_same_run() -> None:
    assert out("seed=3", "optim.lr=0.5") == out("optim.lr=0.5", "seed=3")
    assert out().startswith("outputs/gpt-text-")


@pytest.mark.parametrize("word", ["seed=3", "optim.lr=0.5", "model.layers=2", "steps=5", "batch=32"])
def test_other_words_are_another_run(word: str) -> None:
    assert out(word) != out()


@pytest.mark.parametrize(
    "word",
    [
        "resume=must",
        "stop_after=5",
        "time_limit=60",
        "grace=5",
        "log.every=3",
        "logger=[console]",
        "generate.tokens=3",
        "hook=[]",
    ],
)
def test_words_that_change_no_number_stay_in_the_run(word: str) -> None:
    assert out(word) == out()


def test_your_own_place_is_kept_as_said() -> None:
    assert out("out=s3://bucket/a/") == "s3://bucket/a"
    with pytest.raises(WordsError, match="no place for a run"):
        out("out=/")


def test_memory_is_refused_for_several_ranks() -> None:
    assert out("out=memory://a") == "memory://a"
    with pytest.raises(WordsError, match="memory belongs to one process"):
        out("out=memory://a", "devices=2")


@pytest.mark.parametrize(
    ("target", "name"), [("mypkg.nets.Net", "Net"), ("mypkg.Net.small", "Net"), ("mypkg.make", "make")]
)
def test_a_model_of_your_own_is_named_by_its_class(target: str, name: str) -> None:
    assert out(f"model._target_={target}", "trust=[mypkg]").startswith(f"outputs/{name}-text-")
