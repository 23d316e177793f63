"""Constraints on an argument, as written in YAML files: `int >= 1 steps`, `number >= 0 and < 1`, `[forward, never]`,
`text or null`.

A list is a choice. Otherwise alternatives are separated by `or`: a range (`int` or `number`, bounds, unit), `list of
[count] <alternative>`, one of KINDS, or a literal word.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from dtrain.config.grammar import Unread, texts, typed

RANGE = re.compile(
    r"(?P<kind>int|number)s?(?: (?P<over>>=?) (?P<low>[-\d.e]+))?(?:(?: and)? (?P<under><=?) (?P<high>[-\d.e]+))?"
    r"(?: (?P<unit>[\w ]+))?"
)
BETWEEN = re.compile(r"(\d{1,7}):(\d{1,7})")
CLOCK = re.compile(r"(?:(?:(\d+)-)?(\d+):(?=[0-5]?\d:))?(\d+):([0-5]\d(?:\.\d+)?)")
"""[[days-]hours:]minutes:seconds, as in Slurm: minutes and seconds below 60, but leading minutes."""
SCALES = {"%": 0.01, "k": 1_000, "K": 1_000, "M": 1_000_000, "G": 1_000_000_000, "B": 1_000_000_000}
BYTES = (
    SCALES
    | {
        f"{letter}{end}": base**power
        for power, letter in enumerate("KMGT", 1)
        for end, base in (("B", 1000), ("iB", 1024))
    }
    | {"B": 1}
)
GIB = {"GB": 1, "GiB": 1, "G": 1, "MB": 1 / 1024, "MiB": 1 / 1024, "TB": 1024, "TiB": 1024}
SECONDS = {"ms": 0.001, "min": 60, "m": 60, "h": 3600, "d": 86400}
SCALED = re.compile(r"([+-]?[\d_.]+(?:e[+-]?\d+)?)\s*([a-zA-Z%µ/]*)(?:\s.*)?", re.IGNORECASE | re.DOTALL)
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
NONE = ("none", "null", "nil", "no", "off", "false", "~", "")
"""Spellings of null."""


TYPES: Mapping[type, str] = {bool: "bool", int: "int", float: "number", str: "text", list: "list of any"}
NO_SUGGESTION: Any = object()
"""Result of `instead` if there is nothing to suggest."""


def is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def _is_band(value: Any) -> bool:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(end is None or is_number(end) for end in value)
    ):
        return False
    return None in value or value[0] <= value[1]


def _between(value: str) -> bool:
    match = BETWEEN.fullmatch(value)
    return match is not None and 1 <= int(match[1]) <= int(match[2])


def without_controls(text: str) -> str:
    """`text` without control characters but tabs and newlines."""
    return CONTROLS.sub("", text)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value == without_controls(value)


KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "text": ("text", lambda value: _is_text(value) or type(value) in (int, float)),
    "some text": ("text, not empty", lambda value: _is_text(value) and value != ""),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "null": ("null", lambda value: value is None),
    "part": ("a part with a _target_", lambda value: isinstance(value, Mapping) and "_target_" in value),
    "mapping": ("names with values", lambda value: isinstance(value, Mapping)),
    "clock": (
        "hours:minutes:seconds",
        lambda value: isinstance(value, str) and re.fullmatch(rf"{CLOCK.pattern}|\d+(\.\d+)?", value) is not None,
    ),
    "between": ("a range <fewest>:<most>, such as 1:2", lambda value: isinstance(value, str) and _between(value)),
    "band": ("[lowest, highest], null for an open end", _is_band),
    "any": ("a value", lambda value: True),
}


@dataclass(frozen=True)
class Range:
    """Finite numbers from `low` to `high`; `above` and `below` exclude that end."""

    whole: bool
    low: float
    high: float
    above: bool
    below: bool
    unit: str

    def holds(self, value: Any) -> bool:
        return (
            is_number(value)
            and not (self.whole and not isinstance(value, int))
            and self.low <= value <= self.high
            and not self._at_an_end(value)
        )

    def _at_an_end(self, value: float) -> bool:
        return (self.above and value == self.low) or (self.below and value == self.high)

    def say(self) -> str:
        return f"{'an integer' if self.whole else 'a number'} {self.bounds()}".rstrip() + self._in_unit()

    def say_many(self, count: int) -> str:
        """The same for the items of a list of `count` numbers; 0: of any length."""
        kind = "integers" if self.whole else "numbers"
        bounds = f", each {self.bounds()}" if self.bounds() else ""
        return f"{count or 'a list of'} {kind}{bounds}{self._in_unit()}"

    def bounds(self) -> str:
        """`>= 0 and < 1`"""
        low = [] if self.low == -math.inf else [f"{'>' if self.above else '>='} {_plain(self.low)}"]
        high = [] if self.high == math.inf else [f"{'<' if self.below else '<='} {_plain(self.high)}"]
        return " and ".join(low + high)

    def _in_unit(self) -> str:
        return f", in {self.unit}" if self.unit else ""

    def nearest(self, value: Any) -> float | None:
        """The allowed number that `value` probably means, or the nearest one; None if it is no number."""
        match = SCALED.fullmatch(value.strip()) if isinstance(value, str) else None
        try:
            scales = {"seconds": SECONDS, "bytes": BYTES, "GiB": GIB}.get(self.unit, SCALES)
            number = float(match[1].replace("_", "")) * scales.get(match[2], 1) if match else float(value)
        except (TypeError, ValueError, OverflowError):
            return None
        if not math.isfinite(number) or isinstance(value, bool):
            return None
        if self.whole and number < 1 and match and match[2] == "%":
            return None
        number = min(max(number, self.low), self.high)
        number = round(number) if self.whole or float(number).is_integer() else number
        return number if self.holds(number) else None


@dataclass(frozen=True)
class Many:
    """A list of `count` items; 0: of any length."""

    count: int
    item: "Range | str"

    def holds(self, value: Any) -> bool:
        return (
            isinstance(value, list | tuple)
            and len(value) == (self.count or len(value))
            and all(_holds(self.item, one) for one in value)
        )

    def say(self) -> str:
        if isinstance(self.item, Range):
            return self.item.say_many(self.count)
        return f"a list of {f'{self.count} times ' if self.count else ''}{_say(self.item)}"


Kind = Range | Many | str


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


@cache
def _parse(allowed: str) -> tuple[Kind, ...]:
    return tuple(_alternative(part.strip()) for part in allowed.split(" or "))


def _alternative(text: str) -> Kind:
    many = re.fullmatch(r"list of (?:(\d+) )?(.+)", text)
    if many:
        item = _alternative(many[2])
        if isinstance(item, Many):
            raise ValueError(f"{text}: a list of lists.")
        return Many(int(many[1] or 0), item)
    match = RANGE.fullmatch(text)
    if not match:
        return text
    low, high = float(match["low"] or -math.inf), float(match["high"] or math.inf)
    return Range(
        whole=match["kind"] == "int",
        low=low,
        high=high,
        above=match["over"] == ">",
        below=match["under"] == "<",
        unit=match["unit"] or "",
    )


def kinds(allowed: Any) -> tuple[Kind, ...]:
    return tuple(map(str, allowed)) if isinstance(allowed, list | tuple) else _parse(str(allowed))


EXAMPLES = ("int >= 1", "number >= 0 and < 1", "[relu, gelu]", "text or null", "list of 2 numbers", "bool", "any")


def is_one(allowed: Any) -> bool:
    """Whether a value is a constraint."""
    if isinstance(allowed, list | tuple):
        return len(allowed) > 0 and all(isinstance(word, str) for word in allowed)
    try:
        return isinstance(allowed, str) and all(map(_is_kind, _parse(allowed)))
    except ValueError:  # a bound that is no number
        return False


def _is_kind(kind: Kind) -> bool:
    if isinstance(kind, Many):
        return _is_kind(kind.item)
    return isinstance(kind, Range) or kind in KINDS or re.fullmatch(r"[\w.:/+-]+", kind) is not None


def fits(value: Any, allowed: Any) -> bool:
    """Whether `value` is allowed."""
    return any(_holds(kind, value) for kind in kinds(allowed))


def wants_text(number: float, allowed: Any) -> bool:
    """Whether a typed number is meant as text."""
    texts = ("text", "some text")
    return any(kind in texts for kind in kinds(allowed)) and not any(
        kind not in texts and _holds(kind, number) for kind in kinds(allowed)
    )


def say(allowed: Any) -> str:
    """`an integer >= 1, in steps, or null`."""
    names = [_say(kind) for kind in kinds(allowed)]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" or {names[-1]}"


def instead(value: Any, allowed: Any, default: Any = None) -> Any:
    """Suggest the allowed value nearest to what was typed, otherwise the default or the first choice; NO_SUGGESTION if
    there is none.
    """
    choices = choices_of(allowed)
    near = get_close_matches(str(value).lower(), choices, n=1, cutoff=0.6)
    ranges = [kind for kind in kinds(allowed) if isinstance(kind, Range)]
    numbers = [number for kind in ranges if (number := kind.nearest(value)) is not None]
    ends = BETWEEN.fullmatch(str(value)) if "between" in kinds(allowed) else None
    if ends:
        return ":".join(sorted(ends.groups(), key=int))
    if str(value).lower() in NONE and "null" in choices:
        return None
    if "mapping" in kinds(allowed) and (named := _named(value)):
        return named
    for items in (listed(value), [value]):
        if items and any(isinstance(kind, Many) and kind.holds(items) for kind in kinds(allowed)):
            return items
    if near or numbers:
        return typed(near[0]) if near else numbers[0]
    if isinstance(value, str) and CONTROLS.search(value) and fits(without_controls(value), allowed):
        return without_controls(value)
    if default is not None and fits(default, allowed):
        return default
    return typed(choices[0]) if choices else NO_SUGGESTION


def listed(value: Any) -> list[Any]:
    """The items of a text that is meant as a list, with commas and optional brackets."""
    if not isinstance(value, str):
        return []
    try:
        return [*map(typed, texts(value if value[:1] == "[" else f"[{value.strip('() ')}]"))]
    except Unread:
        return [typed(item.strip(" '\"")) for item in value.strip("[]() ").split(",")]


def _named(value: Any) -> dict[str, Any]:
    """A list of `name=value` or `name:value`, or one of them, as a mapping; empty for anything else."""
    items = value if isinstance(value, list) else listed(value)
    pairs = [re.fullmatch(r"([\w./-]+)\s*[=:]\s*(.*)", str(item)) for item in items]
    return {pair[1]: typed(pair[2]) for pair in pairs if pair} if all(pairs) else {}


def is_of_texts(allowed: Any) -> bool:
    """Whether a value is a list of texts, and never one text."""
    lists = [kind for kind in kinds(allowed) if isinstance(kind, Many)]
    texts_alone = bool(lists) and all(kind.item in ("text", "some text") for kind in lists)
    return texts_alone and not {"text", "some text", "any"}.intersection(map(str, kinds(allowed)))


def choices_of(allowed: Any) -> list[str]:
    """The allowed words."""
    named = [kind for kind in kinds(allowed) if isinstance(kind, str) and kind not in KINDS]
    return named + ["true", "false"] * ("bool" in kinds(allowed)) + ["null"] * ("null" in kinds(allowed))


def _holds(kind: Kind, value: Any) -> bool:
    if isinstance(kind, str):
        return KINDS[kind][1](value) if kind in KINDS else value == kind and isinstance(value, str)
    return kind.holds(value)


def _say(kind: Kind) -> str:
    if isinstance(kind, str):
        return KINDS[kind][0] if kind in KINDS else kind
    return kind.say()


def of_type(value: Any) -> str:
    """A constraint derived from a default value, for arguments without a stated one."""
    if isinstance(value, Mapping):
        return "mapping"
    if value in ("auto", "???") or "${" in str(value):
        return "any"
    return TYPES.get(type(value), "any")
