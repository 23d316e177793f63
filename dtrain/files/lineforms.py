"""How rows are written in lines: JSON, or values between separators."""

import csv
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtrain.errors import an
from dtrain.files import jsonarray, plaintext
from dtrain.files.linekinds import Doubled, Torn, number, once

LONGEST = 1 << 30
"""Bytes of the longest first row."""
BOM = b"\xef\xbb\xbf"
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}


def are_numbers(names: Sequence[str]) -> bool:
    """Whether names of columns are the numbers of a first row: all of them, or a fraction among them."""
    kinds = {type(number(name)) for name in names if name.lower() not in ("nan", "inf", "infinity")}
    return float in kinds or kinds == {int}


def no_names(names: Sequence[str]) -> str:
    """Why numbers are no names of columns."""
    return (
        f"the first line has numbers where the names of columns are read: {','.join(names)[:60]!r}. Write a line of "
        "names above it, such as a,b,label"
    )


class Format(ABC):
    """How rows are written in lines."""

    numbers = True
    """Whether cells that are numbers are read as such."""
    how: Sequence[Any]
    """All that the meaning of the bytes depends on."""

    @abstractmethod
    def header(self, beginning: bytes) -> tuple[list[str], int]:
        """Names of the columns, and where the first row begins. Raises Torn."""

    @abstractmethod
    def parse(self, line: bytes, names: Sequence[str]) -> Mapping[str, Any]:
        """Column -> value. Raises Torn."""

    def columns(self, lines: Sequence[bytes], names: Sequence[str]) -> Mapping[str, Sequence[str]] | None:
        """Column -> the cells of rows; None if the rows have to be parsed one by one."""
        return None

    def separator_of(self, names: Sequence[str]) -> str:
        """The separator that would divide what seems to be one name; empty if there is none."""
        return ""

    def quoted(self, data: np.ndarray[Any, Any], inside: int) -> tuple[Any, int]:
        """(which bytes are in quotes, so that a line break there ends no row; whether the last one is)."""
        return np.zeros(len(data), bool), inside


class JsonLines(Format):
    how = ("jsonl",)

    def header(self, beginning: bytes) -> tuple[list[str], int]:
        begin = len(BOM) if beginning.startswith(BOM) else 0
        if jsonarray.is_array(beginning):
            return list(self.parse(jsonarray.first(beginning) or beginning, ())), begin
        first = next((line for line in beginning[begin:].splitlines() if line.strip()), b"")
        return list(self.parse(first, ())), begin

    def parse(self, line: bytes, names: Sequence[str]) -> Mapping[str, Any]:
        try:
            row = json.loads(line.decode(), object_pairs_hook=once)
        except Doubled:
            raise
        except UnicodeDecodeError:
            raise Torn(f"this row{plaintext.not_utf8(line)[:-1]}") from None
        except ValueError as error:
            raise Torn(f"this is no JSON: {error}") from None
        except RecursionError:
            raise Torn("this is JSON that is nested too deeply") from None
        if not isinstance(row, dict):
            raise Torn(f'a row is an object of columns, such as {{"text": ...}}, not {an(row)}')
        return row


class Separated(Format):
    """RFC 4180: the first row has the names; quotes hold separators, line breaks and doubled quotes. `numbers`: cells
    that are numbers are read as such, but in the columns `texts`.
    """

    def __init__(self, separator: str, *, numbers: bool, texts: Sequence[str] = ()) -> None:
        self._separator, self.numbers, self._texts = separator, numbers, frozenset(texts)
        self.how = ("csv", separator, numbers, *([["texts", *texts]] if texts else []))

    def header(self, beginning: bytes) -> tuple[list[str], int]:
        data = np.frombuffer(beginning, np.uint8)
        ends = np.flatnonzero((data == 10) & ~self.quoted(data, 0)[0])
        end = int(ends[0]) + 1 if len(ends) else len(beginning)
        first = beginning[:end].removeprefix(BOM)
        if mark := re.fullmatch(rb'"?sep=(.)"?\s*', first):
            known = {mark: word for word, mark in SEPARATORS.items()}
            word = known.get(mark[1].decode("latin-1"), f"<one of {', '.join(SEPARATORS)}>")
            raise Torn(f"it is {first.decode().strip()!r}, of Excel. Delete it, and type data.separator={word}")
        names = self._cells(first)
        if len({*names}) < len(names):
            if are_numbers(names):
                raise Torn(no_names(names))
            double = next(name for name in names if names.count(name) > 1)
            raise Torn(f"two columns have the name {double!r}")
        return names, end

    def parse(self, line: bytes, names: Sequence[str]) -> Mapping[str, Any]:
        cells = self._cells(line)
        if len(cells) != len(names):
            raise Torn(f"a row has {len(names)} columns, and this one {len(cells)}")
        read, pairs = number if self.numbers else str, zip(names, cells, strict=True)
        return {name: (cell or None) if name in self._texts else read(cell) for name, cell in pairs}

    def columns(self, lines: Sequence[bytes], names: Sequence[str]) -> Mapping[str, Sequence[str]] | None:
        csv.field_size_limit(LONGEST)
        try:
            texts = [line.decode() for line in lines]
            rows = list(csv.reader(texts, delimiter=self._separator, strict=True))
        except (csv.Error, ValueError):
            return None
        if len(rows) != len(lines) or {*map(len, rows)} != {len(names)}:
            return None
        columns = dict(zip(names, zip(*rows, strict=True), strict=True))
        return None if self._texts & columns.keys() else columns

    def separator_of(self, names: Sequence[str]) -> str:
        counts = {word: names[0].count(mark) for word, mark in SEPARATORS.items()} if len(names) == 1 else {"": 0}
        return max(counts, key=lambda word: counts[word]) if any(counts.values()) else ""

    def quoted(self, data: np.ndarray[Any, Any], inside: int) -> tuple[Any, int]:
        odd = np.bitwise_xor.accumulate(data == 34) if len(data) else np.zeros(0, bool)
        odd = odd ^ bool(inside)
        return odd, int(odd[-1]) if len(odd) else inside

    def _cells(self, line: bytes) -> list[str]:
        csv.field_size_limit(LONGEST)
        try:
            rows = list(csv.reader([line.decode()], delimiter=self._separator, strict=True))
        except UnicodeDecodeError:
            raise Torn(f"this row{plaintext.not_utf8(line)[:-1]}") from None
        except (csv.Error, ValueError) as error:
            raise Torn(f"this is no row of separated values: {error}") from None
        return rows[0] if rows else []
