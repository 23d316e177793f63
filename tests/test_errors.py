"""The error tree: exit codes, and hints that teach."""

import pytest

from dtrain.errors import (
    DtrainError,
    LeaseError,
    PreflightError,
    RankError,
    StoreError,
    WordsError,
    about_data,
    nearest,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DtrainError("x"), 1),
        (RankError("x"), 1),
        (WordsError("x"), 2),
        (PreflightError("x"), 3),
        (StoreError("x"), 3),
        (LeaseError("x"), 3),
    ],
)
def test_each_error_has_its_exit_code(error: DtrainError, code: int) -> None:
    assert error.exit_code == code


def test_a_words_error_carries_every_problem() -> None:
    error = WordsError("one", "two")
    assert error.problems == ("one", "two")
    assert str(error) == "one\ntwo"


def test_a_store_error_says_operation_url_and_cause() -> None:
    assert str(StoreError.during("read", "s3://b/k", "denied")) == "cannot read s3://b/k: denied"


def test_a_misspelt_word_names_the_nearest() -> None:
    assert nearest("fdsp", ["ddp", "fsdp", "single"]) == " Did you mean fsdp?"


def test_a_word_like_nothing_lists_what_is_allowed() -> None:
    assert nearest("zzz", ["b", "a"]) == " Allowed: a, b."
    many = nearest("zzz", [f"name{index:03}" for index in range(300)])
    assert many.startswith(" Allowed: name000, name001, ") and many.endswith(" name007 and 292 others.")


def test_a_sentence_about_data_is_about_that_of_its_key() -> None:
    for error in (WordsError("data: column b holds text.", "data.path=b: gone"), PreflightError("data.path=a: line 3")):
        with pytest.raises(type(error)) as raised, about_data("evaluate.sets.dev"):
            raise error
        assert str(raised.value).startswith("evaluate.sets.dev") and "data" not in str(raised.value).split(":")[0]
        assert str(raised.value) == str(error).replace("data", "evaluate.sets.dev")
    for other in (WordsError("model: it is odd"), StoreError("data: it is full")):
        with pytest.raises(type(other), match=str(other)), about_data("predict.data"):
            raise other
