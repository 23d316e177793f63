"""The kinds of the columns of rows that are written as text: whole numbers, fractions, text, and lists of these."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WHOLE = 1 << 63
TYPES = {"whole": np.int64, "fraction": np.float32}
EXACT = 1 << 24
"""Whole numbers up to this one are all different in fp32."""
WHOLE_CELL = re.compile(r"\s*[-+]?\d+\s*")
SHOWN = 40
"""Characters of a value in a message."""
MISSING = ("na", "n/a", "nan", "null", "none", "nil", "-", "?", ".")
"""Texts that often stand for a number that is missing."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest fraction."""


class Torn(ValueError):
    """A row is not whole, or is no row; says why, and what helps. `row`: another row that the sentence ends with, by
    its number among those that were noted.
    """

    def __init__(self, sentence: str, *, row: int | None = None, mend: str = "") -> None:
        super().__init__(sentence)
        self.row, self.mend = row, mend


class Doubled(Torn):
    """An object of JSON has two values of one name."""


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of JSON with these pairs, for `json.loads`, which would keep the last of two. Raises Doubled."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise Doubled(f"{double!r} is given twice. Leave one out")
    return row


def number(cell: str) -> Any:
    """A cell as a number, if it is one; None if it is empty."""
    if "_" in cell:  # which is no digit in other readers
        return cell
    try:
        return int(cell)
    except ValueError:
        pass
    try:
        return float(cell)
    except ValueError:
        return cell or None


class Kinds:
    """The kind of each column, from all of its values."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.kinds: dict[str, str] = {}
        self.smallest: dict[str, int] = {}
        self.largest: dict[str, int] = {}
        self._columns, self._rows = columns, 0
        self.wholes: dict[str, int] = {}
        """Column -> the largest size of a whole number, also of one in a list."""
        self._texts: dict[str, tuple[int, str]] = {}
        """Column -> the number of the first row that has text there, and the text."""

    @property
    def facts(self) -> dict[str, Any]:
        texts = {name: text for name, (_, text) in self._texts.items()}
        edges = {"smallest": self.smallest, "largest": self.largest, "wholes": self.wholes}
        return {"kinds": self.kinds, "texts": texts, **edges}

    def note(self, row: Mapping[str, Any]) -> None:
        """Raises Torn for a value that is missing, or of another kind than those before."""
        for name in self._columns:
            if name not in row or row[name] is None:
                raise Torn(f"column {name} is {'empty' if name in row else 'missing'}")
            value, before = row[name], self.kinds.get(name)
            kind = _kind(value, name)
            if not _fits(value, kind):
                raise Torn(
                    f"column {name} is {_odd(value)[:40]}: numbers are finite, fractions have 32 bits (up to "
                    f"{LARGEST:.2g}), and whole ones have 64"
                )
            if (most := _whole(value, kind)) > self.wholes.get(name, 0):
                self.wholes[name] = most
            if kind != before:
                if kind == "text":
                    self._texts.setdefault(name, (self._rows, value[:SHOWN]))
                self.kinds[name] = kind if before is None else self._both(before, kind, name, value)
            if kind == "whole":
                number = int(value)
                self.smallest[name] = min(number, self.smallest.get(name, number))
                self.largest[name] = max(number, self.largest.get(name, number))
        self._rows += 1

    def _both(self, one: str, other: str, name: str, value: Any) -> str:
        """The kind of a column of both kinds. Raises Torn, and names the text where one of them is text."""
        if one.replace("fraction", "whole") == other.replace("fraction", "whole"):
            return one.replace("whole", "fraction")
        if one == "text":
            row, text = self._texts[name]
            sentence = f"column {name} is {str(value)[:SHOWN]}, and the text {text!r}"
            raise Torn(sentence, row=row, mend=mend_of(text))
        known = "a number" if one in TYPES else one.replace("whole", "numbers").replace("fraction", "numbers")
        mend = mend_of(value) if isinstance(value, str) else ""
        raise Torn(f"column {name} is {str(value)[:SHOWN]!r}, after rows in which it was {known}", mend=mend)

    def note_all(self, columns: Mapping[str, Sequence[str]], *, numbers: bool) -> bool:
        """Note the cells of many rows, if all of a column are numbers, or text where none are read as such; False, and
        nothing is noted, if they have to be looked at one by one.
        """
        if not {*self._columns} <= columns.keys():
            return False
        rows = len(next(iter(columns.values())))
        if not numbers:
            self._rows += rows
            self.kinds |= dict.fromkeys(self._columns, "text")
            return True
        noted = dict[str, tuple[str, int, int]]()
        for name in self._columns:
            values = _numbers(columns[name])
            if values is None or self.kinds.get(name, "whole") not in TYPES:
                return False
            least, most = min(values), max(values)
            kind = "whole" if isinstance(least, int) else "fraction"
            bound = WHOLE - 1 if kind == "whole" else LARGEST
            if not -bound <= least <= most <= bound or not math.isfinite(sum(values)):
                return False
            noted[name] = kind, int(least), int(most)
        self._rows += rows
        for name, (kind, smallest, largest) in noted.items():
            self.kinds[name] = kind if self.kinds.get(name, kind) == kind else "fraction"
            if kind == "whole":
                self.smallest[name] = min(smallest, self.smallest.get(name, smallest))
                self.largest[name] = max(largest, self.largest.get(name, largest))
            most = max(-smallest, largest)
            if kind == "fraction" and most > EXACT:
                most = max((abs(int(cell)) for cell in columns[name] if WHOLE_CELL.fullmatch(cell)), default=0)
            if kind == "whole" or most > EXACT:
                self.wholes[name] = max(most, self.wholes.get(name, 0))
        return True


def _numbers(cells: Sequence[str]) -> list[int] | list[float] | None:
    """The cells as numbers of one kind, as `number` reads them; None if they are none, or of both kinds."""
    if not cells or "_" in "".join(cells):
        return None
    try:
        return list(map(int, cells))
    except ValueError:
        pass
    try:
        return list(map(float, cells))
    except ValueError:
        return None


def _kind(value: Any, name: str) -> str:
    if isinstance(value, int):
        return "whole"
    if isinstance(value, float):
        return "fraction"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        types = {*map(type, value)}
        if types and types <= {int, float}:  # without an array: most lists are rows of numbers
            return "list of fraction" if float in types else "list of whole"
        try:
            array = np.asarray(value)
        except ValueError:
            raise Torn(f"column {name} has lists of different lengths in one row") from None
        if array.dtype.kind in "iubf":
            return f"list of {'fraction' if array.dtype.kind == 'f' and array.size else 'whole'}"
        if array.dtype.kind == "O" and any(each is None for each in array.flat):
            raise Torn(f"column {name} has null in a list. Drop or fill it")
        return f"list of {array.dtype.name}" if array.dtype.kind != "O" else "list of objects"
    return {"dict": "object"}.get(type(value).__name__, type(value).__name__)


def _whole(value: Any, kind: str) -> int:
    """The largest size of the whole numbers of a value; 0 if it has none, or lists of lists."""
    if kind == "whole":
        return abs(int(value))
    if kind == "list of whole" and value and not isinstance(value[0], list):
        return int(max(max(value), -min(value)))
    if kind == "list of fraction" and int in {*map(type, value)}:
        return int(max(abs(each) for each in value if type(each) is int))
    return 0


def _fits(value: Any, kind: str) -> bool:
    """Whether numbers are finite and, if whole, of 64 bits; fractions of 32."""
    if kind == "fraction":
        return -LARGEST <= float(value) <= LARGEST
    if kind == "whole":
        return -WHOLE <= int(value) < WHOLE
    if kind == "list of whole" and value:
        nested = isinstance(value[0], list)
        return np.asarray(value).dtype.kind != "u" if nested else min(value) >= -WHOLE and max(value) < WHOLE
    if kind != "list of fraction":
        return True
    if isinstance(value[0], list):
        return bool((np.abs(np.asarray(value, np.float64)) <= LARGEST).all())
    # a NaN is no smallest and no largest number, but makes a sum of its own
    return min(value) >= -LARGEST and max(value) <= LARGEST and math.isfinite(sum(value))


def _odd(value: Any) -> str:
    """The first number of a value that does not fit."""
    if not isinstance(value, list):
        return str(value)
    for each in value:
        odd = _odd(each) if isinstance(each, list) else str(each) * (not _fits(each, _kind(each, "")))
        if odd:
            return odd
    return ""


def mend_of(text: str) -> str:
    """A sentence about how a text becomes a number; empty if it stands for none."""
    if re.fullmatch(r"[-+]?\d[\d.]*,\d+", text):
        return " Write a point before the fraction of a number, and nothing between its other digits."
    return " Drop or fill what is missing." if text.strip().lower() in MISSING else ""
