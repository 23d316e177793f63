"""A file of JSON lines or comma-separated values, whose rows are read by their place in it. Every row is read once when
its index is made, so that one that is none is told with its line before training; a remote file is copied then.
"""

import hashlib
import json
import mmap
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.errors import PreflightError, WordsError
from dtrain.files import jsonarray, plaintext, rowindex
from dtrain.files.lineforms import LONGEST, Format, Separated, are_numbers, no_names
from dtrain.files.linekinds import TYPES, Doubled, Kinds, Torn
from dtrain.files.packed import PACKED
from dtrain.files.rowindex import Columns, Indices
from dtrain.storage import mapped, store

CHUNK = 1 << 22
HEAD = 1 << 20
"""Bytes of each end of a file that are looked at before the launch, or more for a longer first row."""
LINE = b"\n"
SPOT, SPOTS = 4096, 64
"""Bytes of a place in a file and places by which one that has grown is known again."""
TOGETHER = 4096
"""Rows that are parsed at once, where that is possible."""


def names(url: str, form: Format) -> list[str]:
    """The columns of a file. Raises PreflightError."""
    return _named(url, form, _beginning(url))[0]


def _beginning(url: str) -> bytes:
    """The begin of a file, to the end of its first row at least if that has an end below LONGEST."""
    count = HEAD
    while True:
        data = store.beginning(url, count)
        is_array = jsonarray.is_array(data)
        whole = jsonarray.first(data) is not None if is_array else LINE in data.lstrip()
        if whole or len(data) < count or count >= LONGEST:
            return data
        count *= 8


def check(url: str, form: Format, columns: Sequence[str]) -> None:
    """Look at both ends of a file. Raises PreflightError for a torn last row, and WordsError for a missing column."""
    beginning = _beginning(url)
    names, begin = _named(url, form, beginning)
    _check_columns(url, form, columns, names)
    size, end = store.size(url), store.ending(url, HEAD)
    if size == begin:
        return
    rows = end.rstrip()
    if jsonarray.is_array(beginning):
        if not rows.endswith(b"]"):
            raise PreflightError(f"data.path={url}: the array has no end, so the file is torn.")
        return
    last = rows.rpartition(b"\n")[2]
    # the row may begin before what was read; and an odd number of quotes ends one that began on a line before
    if len(last) == len(rows) or (isinstance(form, Separated) and last.count(b'"') % 2):
        return
    try:
        form.parse(last, names)
    except Torn as error:
        line = ""
        if store.is_local(url):  # all of another file would have to come here to be counted
            line = f", line {_lines(store.local_path(url), size) + (not end.endswith(LINE))},"
        torn = "" if isinstance(error, Doubled) else " is torn"
        raise PreflightError(f"data.path={url}: its last row{line}{torn}: {error}.") from None


@dataclass(frozen=True)
class LineFile:
    """`columns`: those that are read; `raw`: as they are, of any kind, and None where a row has none; `alone`: what to
    type if a row has others; empty: these are not read. Raises PreflightError for a file of which a row cannot be.
    """

    url: str
    form: Format
    columns: Sequence[str]
    cache: Path
    raw: bool = False
    alone: str = ""
    facts: Mapping[str, Any] = field(init=False)
    _stem: Path = field(init=False)
    _grown: set[str] = field(init=False, repr=False, compare=False, default_factory=set)
    """Later fingerprints of the file, after rows were added."""

    def __post_init__(self) -> None:
        beside = [".npy"] if store.is_local(self.url) else [".npy", ".copy"]
        key = [*how(self.form, self.columns, self.raw), *(["all"] if self.alone else [])]
        facts, stem = rowindex.kept(self.cache, self.url, key, self._made, beside)
        object.__setattr__(self, "facts", facts)
        object.__setattr__(self, "_stem", stem)

    def digest(self, rows: int | None = None) -> str:
        if rows in (None, self.facts["sizes"][0]):
            return str(self.facts["sha256"])
        if not rows or rows > self.facts["sizes"][0]:
            return ""
        digest, end = hashlib.sha256(), int(self._offsets[rows - 1, 1])
        for start in range(0, end, CHUNK):
            digest.update(self._bytes[start : min(end, start + CHUNK)])
        return self._finished(digest)

    def first(self, rows: int) -> Mapping[str, Any]:
        if rows == self.facts["sizes"][0]:
            return self.facts

        def make(_: Path) -> Mapping[str, Any]:
            found = Kinds(self.columns)
            for row in self._rows(np.arange(rows)):
                found.note(row)
            return {"sizes": [rows], "sha256": self.digest(rows), **found.facts}

        return rowindex.kept(self.cache, self.url, [*how(self.form, self.columns, self.raw), rows], make)[0]

    def read(self, block: int, index: Indices) -> Columns:
        rows = list(self._rows(index))
        if self.raw:
            return {name: [row.get(name) for row in rows] for name in self.columns}
        return {name: self._column(name, [row[name] for row in rows]) for name in self.columns}

    def where(self, row: int) -> str:
        return f"line {_lines(self._file(self._stem), int(self._offsets[row, 0])) + 1}"

    def _rows(self, index: Indices) -> Iterator[Mapping[str, Any]]:
        places = self._spots  # of the file as it was first
        if store.is_local(self.url):
            self._check(places)
        names = self.facts["names"]
        for begin, end in self._offsets[index].tolist():
            yield self.form.parse(self._bytes[begin:end], names)

    def _check(self, spots: bytes) -> None:
        """Raises ChangedError unless the file is that of the index, or has this at its `spots` and is longer. One that
        was removed is read as it was when it was mapped.
        """
        now = rowindex.present(self.url)
        if now in ("", self.facts["fingerprint"]) or now in self._grown:
            return
        if store.size(self.url) <= len(self._bytes) or self._look() != spots:
            rowindex.unchanged(self.url, self.facts["fingerprint"])
        self._grown.add(now)

    @cached_property
    def _spots(self) -> bytes:
        return self._look()

    def _look(self) -> bytes:
        """Some bytes of the rows, evenly spread, with both ends."""
        end = int(self._offsets[-1, 1]) if self.facts["sizes"][0] else 0
        begins = np.linspace(0, max(0, end - SPOT), SPOTS).astype(np.int64).tolist()
        return b"".join(self._bytes[begin : min(end, begin + SPOT)] for begin in begins)

    def _finished(self, digest: Any) -> str:
        """The digest of the bytes and of how they are read."""
        digest.update(json.dumps([*how(self.form, self.columns, self.raw)]).encode())
        return str(digest.hexdigest())

    def _column(self, name: str, values: list[Any]) -> Any:
        kind, _, of = self.facts["kinds"][name].partition("list of ")
        if not of:
            return np.array(values, TYPES[kind]) if kind in TYPES else values
        arrays = [np.asarray(value, TYPES[of]) for value in values]
        return rowindex.alike(arrays)

    @cached_property
    def _offsets(self) -> Any:
        return np.load(f"{self._stem}.npy", mmap_mode="r", allow_pickle=False)

    @cached_property
    def _bytes(self) -> Any:
        try:
            file = mapped.note(self._file(self._stem), grows=True).open("rb")
        except FileNotFoundError:
            raise rowindex.removed(self.url) from None
        with file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.facts["sizes"][0] else b""

    def _file(self, stem: Path) -> Path:
        return store.local_path(self.url) if store.is_local(self.url) else Path(f"{stem}.copy")

    def _made(self, stem: Path) -> Mapping[str, Any]:
        file = self._file(stem)
        if not store.is_local(self.url):
            store.download(self.url, file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
        beginning = _beginning(str(file))
        names, begin = _named(self.url, self.form, beginning)
        typed = [] if self.raw else self.columns
        _check_columns(self.url, self.form, typed, names)
        found, digest = Kinds(typed), hashlib.sha256()
        offsets = array("q")  # 16 bytes a row
        for rows in _together(self._split(file, begin, digest, jsonarray.is_array(beginning))):
            columns = self.form.columns([line for _, line in rows], names)
            if columns is None or not found.note_all(columns, numbers=self.form.numbers):
                self._note(file, rows, names, found, offsets)
            else:
                offsets.extend(chain.from_iterable((start, start + len(line)) for start, line in rows))
        part = Path(f"{stem}.part")
        with part.open("wb") as out:
            np.save(out, np.frombuffer(offsets, np.int64).reshape(-1, 2) if offsets else np.zeros((0, 2), np.int64))
        part.replace(f"{stem}.npy")  # others may have mapped the one before
        return {
            "names": names, "sizes": [len(offsets) // 2], "bytes": [file.stat().st_size],
            "sha256": self._finished(digest), **found.facts,
        }  # fmt: skip

    def _split(self, file: Path, begin: int, digest: Any, is_array: bool) -> Iterator[tuple[int, bytes]]:
        """(offset, bytes) of each row; all bytes of the file are added to `digest`. Raises PreflightError."""
        if not is_array:
            yield from _split(file, self.form, begin, digest)
            return
        try:
            yield from jsonarray.elements(file, digest)
        except jsonarray.Broken as error:
            raise PreflightError(f"data.path={self.url}: line {_lines(file, error.at) + 1}: {error}.") from None

    def _note(self, file: Path, rows: Any, names: Sequence[str], found: Kinds, offsets: Any) -> None:
        """Note rows one by one, and the place of each. Raises PreflightError, with its line, for one that is none."""
        for start, line in rows:
            if not line.strip():
                continue
            try:
                row = self.form.parse(line, names)
                found.note(row)
                if self.alone and len(row) > len(self.columns):
                    more = next(name for name in row if name not in self.columns)
                    raise Torn(f"it has a column {more}, which the first row lacks. {self.alone}")
            except Torn as error:
                other = "" if error.row is None else f" in line {_lines(file, offsets[2 * error.row]) + 1}"
                line = _lines(file, start) + 1
                raise PreflightError(f"data.path={self.url}: line {line}: {error}{other}.{error.mend}") from None
            offsets.extend((start, start + len(line)))


def how(form: Format, columns: Sequence[str], raw: bool = False) -> list[Any]:
    """All that the index of a file depends on beside it."""
    return [*form.how, *columns, *(["raw"] if raw else [])]


def _named(url: str, form: Format, beginning: bytes) -> tuple[list[str], int]:
    """Columns, and where the first row begins. Raises PreflightError."""
    if not beginning.strip():
        raise PreflightError(f"data.path={url}: the file is empty.")
    for magic, kind in PACKED.items():
        if beginning.startswith(magic):
            raise PreflightError(f"data.path={url} is packed with {kind}: its rows have no place. Unpack it.")
    if encoding := plaintext.encoding_of(beginning):
        raise PreflightError(f"data.path={url} {encoding}")
    if b"\r" in beginning and LINE not in beginning and not jsonarray.is_array(beginning):
        raise PreflightError(
            f"data.path={url}: its lines end in a carriage return alone, as on old Macs. Type tr '\\r' '\\n' "
            "< <the file> > <another>, and name that."
        )
    try:
        return form.header(beginning)
    except Torn as error:
        raise PreflightError(f"data.path={url}: line 1: {error}.") from None


def _check_columns(url: str, form: Format, columns: Sequence[str], names: Sequence[str]) -> None:
    """Raises WordsError for a column that is not there, and for names that another separator divides."""
    is_lacking = any(name not in names for name in columns)
    if is_lacking and isinstance(form, Separated) and are_numbers(names):
        raise WordsError(f"data.path={url}: {no_names(names)}.")
    if is_lacking and (other := form.separator_of(names)):
        raise WordsError(
            f"data.path={url}: its first line is one name, {names[0][:60]!r}: the columns seem to be separated by a "
            f"{other}. Type data.separator={other}."
        )
    for name in columns:
        rowindex.column(name, names, f"data.path={url}")


def _split(file: Path, form: Format, begin: int, digest: Any) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of each row from `begin` on; all bytes of the file are added to `digest`."""
    left, at, inside = b"", begin, 0
    with file.open("rb") as opened:
        digest.update(opened.read(begin))
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
            data = np.frombuffer(chunk, np.uint8)
            quoted, inside = form.quoted(data, inside)
            start = 0
            for end in (np.flatnonzero((data == 10) & ~quoted) + 1).tolist():
                line = left + chunk[start:end]
                yield at, line
                at, left, start = at + len(line), b"", end
            left += chunk[start:]
    if left:
        yield at, left


def _together(rows: Iterator[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Several rows at a time, of few bytes together."""
    several, first = list[tuple[int, bytes]](), 0
    for row in rows:
        several.append(row)
        if len(several) == TOGETHER or row[0] - first > CHUNK:
            yield several
            several, first = [], row[0]
    if several:
        yield several


def _lines(file: Path, end: int) -> int:
    """Line breaks before `end`."""
    count = 0
    with file.open("rb") as opened:
        while end > 0 and (chunk := opened.read(min(CHUNK, end))):
            count += chunk.count(b"\n")
            end -= len(chunk)
    return count
