"""Plain values mean what they mean in Hydra's grammar."""

import math
import random
from typing import Any

import pytest

from dtrain.compose import hydra
from dtrain.config import grammar
from dtrain.config.word import quote, spelling

PIECES = (
    "1", "0", "-2", "+3", "007", "1_000", "1__0", "1.5", ".5", "5.", "1e3", "1E-3", "-1e+2", "1e", "nan", "-inf", "Inf", "true", "FALSE", "null", "Null", "abc",
    "a-b", "a.b", "x_1", "s3://b/k", "*", "/", "%", "@", "?", "|", ":", " ", "\t", ",", "[", "]", "{", "}", "'", '"', "=", "é", "a:1", "'a b'", '"c,d"', "''", "#",
)  # fmt: skip


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(map(same, one.values(), other.values()))
    return type(one) is type(other) and (
        one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))
    )


def meant(read: Any, text: str) -> Any:
    try:
        values = read(text)
    except grammar.Unread:
        return "no value"
    return values[0] if len(values) == 1 else "several"


@pytest.mark.parametrize("seed", range(4))
def test_values_are_read_as_hydra_reads_them(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        text = "".join(draw.choices(PIECES, k=draw.randint(1, 7))).strip()
        if text:
            assert same(meant(grammar.read, text), meant(hydra.read, text)), text


@pytest.mark.parametrize("text", ["[" * 5000, "1" * 6000, "{a:" * 100 + "1" + "}" * 100])
def test_what_is_too_deep_or_too_long_to_be_a_value_is_text(text: str) -> None:
    assert meant(grammar.read, text) in ("no value", text)


@pytest.mark.parametrize("text", ["it's", "a\\", "a\\'b", "\\\\", "'", "a\\'", "x=1,y"])
def test_quoted_text_comes_back(text: str) -> None:
    assert hydra.read(quote(text)) == [text]


@pytest.mark.parametrize("text", ["[", "[a", "a]", "[a,]", "[,a]", "[it's]", "[a]b", "[a][b]", "[a\\]", "[a},{b]"])
def test_what_is_no_list_of_texts_is_not_read_as_one(text: str) -> None:
    with pytest.raises(grammar.Unread):
        grammar.texts(text)


def test_a_list_comes_back_from_its_spelling() -> None:
    value = ["ünï", "b", {"a": "é"}, 1, "1", "1e3", "nan", "true", True]
    assert grammar.read(spelling(value)) == [value]
