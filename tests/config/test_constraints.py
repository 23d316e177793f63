"""What an argument may be, and what is told to whoever missed it."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

import dtrain
from dtrain.config import constraints
from dtrain.config.facts import FACTS
from dtrain.config.schema import ALLOWED

CONF = Path(dtrain.__file__).parents[1] / "conf"


@pytest.mark.parametrize(
    ("allowed", "good", "bad"),
    [
        ("int >= 1 steps", (1, 10**9), (0, 1.0, "1", True, None, math.nan, 10**400)),
        ("number > 0 or null", (0.1, 5, None), (0, -1, math.inf, "x")),
        ("number >= 0 and < 1", (0, 0.99), (1, -0.1)),
        ("number >= 0 and <= 1", (0, 1), (1.01,)),
        ("list of 2 numbers >= 0 and < 1", ([0.9, 0.95],), ([0.9], [1, 1], 0.9, "ab")),
        (["forward", "never"], ("forward",), ("Forward", 1, None)),
        ("text", ("", "a", 7), (True, None, [])),
        ("between", ("1:2", "3:3"), ("2:1", "0:1", 1)),
        ("number > 0 seconds or clock", (5, "1:00:00", "2-00:00:00", "90:00"), ("1h", 0, "1:99:00", "1:00:99", "1:60")),
        ("part or null", ({"_target_": "a.b"}, None), ({"a": 1}, "a")),
        ("blocks or cost or list of ints >= 1", ("cost", [2, 1]), ("heavy", [0])),
    ],
)
def test_what_is_allowed(allowed: Any, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    assert [value for value in good if not constraints.fits(value, allowed)] == []
    assert [value for value in bad if constraints.fits(value, allowed)] == []


@pytest.mark.parametrize(
    ("value", "allowed", "default", "instead"),
    [
        ("8k", "int >= 1 samples", 8, 8000),
        ("10m", "int >= 0 steps", 200, 10),
        ("1h", "number > 0 seconds", None, 3600),
        ("1e-3s", "number >= 0", 0.1, 0.001),
        (-5, "number >= 0 and <= 1", 0.5, 0),
        (math.nan, "number >= 0", 0.1, 0.1),
        ("nevr", ["forward", "never"], "forward", "never"),
        ("a", "list of text", None, ["a"]),
        ("???", "text", None, constraints.NO_SUGGESTION),
    ],
)
def test_what_was_meant(value: Any, allowed: Any, default: Any, instead: Any) -> None:
    assert constraints.instead(value, allowed, default) == instead


def test_it_is_said_in_words() -> None:
    assert constraints.say("int >= 1 steps or null") == "an integer >= 1, in steps or null"
    assert constraints.say(["a", "b", "c"]) == "a, b or c"


def stated() -> dict[str, Any]:
    """Place -> constraint, of all keys, facts and words."""
    statements: dict[str, Any] = {**ALLOWED}
    statements |= {f"{group}.{name}": each for group, facts in FACTS.items() for name, each in facts.items()}
    for path in sorted(CONF.rglob("*.yaml")):
        word = yaml.safe_load(path.read_text()) or {}
        allowed = (word.get("_about_") or {}).get("allowed") or {}
        statements |= {f"{path.parent.name}/{path.stem}.{name}": each for name, each in allowed.items()}
    return statements


@pytest.mark.parametrize(("place", "allowed"), stated().items())
def test_a_constraint_is_in_the_notation(place: str, allowed: Any) -> None:
    """A slip of it would be taken for a word that may be typed, such as `whole from 1`."""
    for kind in constraints.kinds(allowed):
        assert not isinstance(kind, str) or kind in constraints.KINDS or " " not in kind, place
