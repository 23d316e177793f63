"""Validates the structure of data from a file: a table lists the type of each key, and `fault` names the first
mismatch.

fault({"step": "ten"}, {"step": COUNT})        # "step is 'ten', not an integer >= 0"
fault({}, {"step?": COUNT})                    # "": a key with ? may be missing; other keys are ignored
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGEST = 1 << 62
"""Upper bound of a count, so that the sum of two fits in an int64 of numpy or torch."""


@dataclass(frozen=True)
class Kind:
    name: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Each:
    """A list whose items have the shape `item`; with `named`, a mapping whose values do."""

    item: Any
    named: bool = False


@dataclass(frozen=True)
class Optional:
    """Null, or a value of this shape."""

    shape: Any


COUNT = Kind("an integer >= 0", lambda value: type(value) is int and 0 <= value < LARGEST)
NUMBER = Kind("a number", lambda value: type(value) in (int, float) and abs(value) < LARGEST and math.isfinite(value))
FINITE = Kind(
    "a finite number",
    lambda value: (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < LARGEST),
)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))
MAPPING = Kind("a mapping", lambda value: isinstance(value, dict))


def fault(value: Any, shape: Any, place: str = "it") -> str:
    """Describe the first place where `value` does not have `shape`; empty if there is none."""
    if isinstance(shape, Kind):
        return "" if shape.holds(value) else f"{place} is {_short(value)}, not {shape.name}"
    if isinstance(shape, Optional):
        problem = "" if value is None else fault(value, shape.shape, place)
        return f"{problem} or null" if problem and isinstance(shape.shape, Kind) else problem
    if isinstance(shape, Each):
        if not isinstance(value, dict if shape.named else list):
            return f"{place} is {_short(value)}, not a {'mapping' if shape.named else 'list'}"
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (fault(item, shape.item, f"{place}[{_short(key)}]") for key, item in items)), "")
    if not isinstance(value, dict):
        return f"{place} is {_short(value)}, not a mapping"
    for key, wanted in shape.items():
        name = key.removesuffix("?")
        if name not in value:
            if name == key:
                return f"{place} has no {name}"
        elif problem := fault(value[name], wanted, name if place == "it" else f"{place}.{name}"):
            return problem
    return ""


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'}"
    return repr(value)[:40] if not isinstance(value, int) or abs(value) < LARGEST else "a number too large"
