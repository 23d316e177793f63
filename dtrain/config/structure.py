"""The shape of data that comes from a file: a table says what each place of it must be, and `fault` names the first
place that is something else.

fault({"step": "ten"}, {"step": COUNT})        # "step is 'ten', not an integer >= 0"
fault({}, {"step?": COUNT})                    # "": a key with ? may be missing; other keys are not judged
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LARGEST = 1 << 62
"""No count reaches it, so that the sum of two is still one for numpy and torch."""


@dataclass(frozen=True)
class Kind:
    name: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Each:
    """A list of which each item has the shape `item`; of a mapping (`named`), each value."""

    item: Any
    named: bool = False


@dataclass(frozen=True)
class Optional:
    """Null, or what has this shape."""

    shape: Any


COUNT = Kind("an integer >= 0", lambda value: type(value) is int and 0 <= value < LARGEST)
NUMBER = Kind("a number", lambda value: type(value) in (int, float) and abs(value) < LARGEST and math.isfinite(value))
FINITE = Kind(
    "a finite number",
    lambda value: (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < LARGEST),
)
TEXT = Kind("text", lambda value: isinstance(value, str))
MAPPING = Kind("a mapping", lambda value: isinstance(value, dict))


def fault(value: Any, shape: Any, place: str = "it") -> str:
    """A clause about the first place where `value` is not as `shape` says; nothing when all is."""
    if isinstance(shape, Kind):
        return "" if shape.holds(value) else f"{place} is {_short(value)}, not {shape.name}"
    if isinstance(shape, Optional):
        found = "" if value is None else fault(value, shape.shape, place)
        return f"{found} or null" if found and isinstance(shape.shape, Kind) else found
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
        elif found := fault(value[name], wanted, name if place == "it" else f"{place}.{name}"):
            return found
    return ""


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'}"
    return repr(value)[:40] if not isinstance(value, int) or abs(value) < LARGEST else "a number too large"
