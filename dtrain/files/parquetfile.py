"""A Parquet file whose row groups are read one at a time, by ranges where it is remote. Its index is its footer."""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import PreflightError, first_line
from dtrain.files import rowindex
from dtrain.files.rowindex import Columns, Indices
from dtrain.storage import store

MAGIC = b"PAR1"
TAIL = 1 << 16
"""Bytes of a file's end that hold most footers."""
KINDS = {"whole": np.int64, "fraction": np.float32}
"""The kinds of columns that are numbers, and their types here."""
PARTS, PART = 16, 1 << 22
"""In how many parts the columns of a row group are read, at most, and bytes of a part, about."""
MISSING = "{} needs the pyarrow package. Type: pip install 'dtrain[parquet]'"


def library(what: str) -> Any:
    """The package, whose module `parquet` is imported too. Raises PreflightError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise PreflightError(MISSING.format(what)) from None
    return pyarrow


def names(url: str) -> list[str]:
    """The columns of a file. Raises PreflightError."""
    return list(_parsed(url, footer(url)).schema.to_arrow_schema().names)


def footer(url: str) -> bytes:
    """The end of a Parquet file that describes it. Raises PreflightError for another file, or one without its end."""
    end = store.ending(url, TAIL)
    size = struct.unpack("<I", end[-8:-4])[0] + 8 if len(end) >= 8 and end.endswith(MAGIC) else 0
    if size > len(end) == TAIL:
        end = store.ending(url, size)
    if not 8 < size <= len(end):
        starts = store.beginning(url, 4) == MAGIC
        word = OTHERS.get(url.rpartition(".")[2].lower())
        hint = f" Type data={word}, which reads such files." if word else ""
        fault = "its end is missing, so it is torn." if starts else f"this is no Parquet file.{hint}"
        raise PreflightError(f"data.path={url}: {fault}")
    return end[-size:]


OTHERS = {"csv": "csv", "tsv": "csv", "jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl"}
"""Ending of the name of a file in another format -> the word that reads it."""


class Groups:
    """The row groups that were read last, of `most` bytes together or the last one alone."""

    def __init__(self, most: int) -> None:
        self._most, self._turn = most, Lock()
        self._kept: dict[tuple[str, int], tuple[int, Any]] = {}

    def get(self, key: tuple[str, int], size: int, read: Callable[[], Any]) -> Any:
        """The group of that key, of `size` bytes."""
        with self._turn:
            entry = self._kept.pop(key, None)
            if entry is None:
                while self._kept and sum(size for size, _ in self._kept.values()) + size > self._most:
                    del self._kept[next(iter(self._kept))]
                entry = size, read()
            self._kept[key] = entry
            return entry[1]


@dataclass(frozen=True)
class ParquetFile:
    """`columns`: those that are read; `raw`: as they are, of any kind. `groups`: row groups that were read, of this
    file and others.
    """

    url: str
    columns: Sequence[str]
    cache: Path
    groups: Groups
    raw: bool = False
    facts: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        facts, _ = rowindex.kept(self.cache, self.url, how(self.columns, self.raw), self._made)
        object.__setattr__(self, "facts", facts)

    def group(self, number: int) -> Any:
        """Row group `number` as a pyarrow Table. Raises StoreError, and PreflightError if the file has changed."""
        rowindex.unchanged(self.url, self.facts["fingerprint"])
        arrow = library("a Parquet file")

        def read(source: Any, columns: Sequence[str] = self.columns, about: Any = None) -> Any:
            mapped = isinstance(source, str)
            # threads of its own would take the cores of training
            with arrow.parquet.ParquetFile(source, metadata=about, memory_map=mapped, pre_buffer=True) as opened:
                return opened.read_row_group(number, columns=[*columns], use_threads=False)

        def read_parts(path: str) -> Any:
            """Some columns at a time: what is mapped and decoded is memory until the file is closed."""
            about, count = arrow.parquet.read_metadata(path), 1 + self.facts["bytes"][number] // PART
            count = min(count, PARTS, len(self.columns))
            parts = [read(path, self.columns[first::count], about) for first in range(count)]
            arrow.default_memory_pool().release_unused()
            columns = {name: part.column(name) for part in parts for name in part.column_names}
            return arrow.Table.from_arrays([*columns.values()], names=[*columns])

        try:
            if store.is_local(self.url):
                return read_parts(str(store.local_path(self.url)))
            return store.opened(self.url, read)
        except (arrow.ArrowException, OSError) as error:
            raise PreflightError(
                f"data.path={self.url}: row group {number + 1} is damaged: {first_line(error)}"
            ) from None

    def digest(self, rows: int | None = None) -> str:
        return str(self.facts["sha256"]) if rows in (None, sum(self.facts["sizes"])) else ""

    def first(self, rows: int) -> Mapping[str, Any]:
        return self.facts

    def read(self, block: int, index: Indices) -> Columns:
        size = self.facts["bytes"][block]
        group = self.groups.get((self.url, block), size, lambda: self.group(block))
        if self.raw:
            return unread(group, index)
        return values(group, index, self.url, sum(self.facts["sizes"][:block]))

    def where(self, row: int) -> str:
        return f"row {row + 1}"

    def _made(self, stem: Path) -> Mapping[str, Any]:
        end = footer(self.url)
        about = _parsed(self.url, end)
        schema = about.schema.to_arrow_schema()
        for name in self.columns:
            rowindex.column(name, schema.names, f"data.path={self.url}")
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        wanted = [
            number for number in range(about.num_columns)
            if any(f"{about.schema.column(number).path}.".startswith(f"{name}.") for name in self.columns)
        ]  # fmt: skip
        edges = {about.schema.column(number).path: _edges(groups, number) for number in wanted}
        if large := [f"column {name} has {edge[1]}" for name, edge in edges.items() if edge and edge[1] >> 63]:
            raise PreflightError(f"data.path={self.url}: {large[0]}, and numbers have 63 bits.")
        return {
            "names": schema.names, "sizes": [group.num_rows for group in groups],
            "bytes": [sum(group.column(number).total_uncompressed_size for number in wanted) for group in groups],
            "sha256": hashlib.sha256(end + repr([*self.columns]).encode()).hexdigest(),
            "kinds": {name: kind_of(schema.field(name).type) for name in self.columns}, "classes": class_names(schema),
            "smallest": {name: edge[0] for name, edge in edges.items() if edge},
            "largest": {name: edge[1] for name, edge in edges.items() if edge},
        }  # fmt: skip


def how(columns: Sequence[str], raw: bool = False) -> list[Any]:
    """All that the index of a file depends on beside it."""
    return ["parquet", *columns, *(["raw"] if raw else [])]


def unread(table: Any, index: Indices) -> Columns:
    """The columns of some rows of a table, as values of Python."""
    if any("binary" in str(each.type) for each in table.schema):  # take would copy all of the column
        return {name: [table.column(name)[row].as_py() for row in index.tolist()] for name in table.column_names}
    rows = _rows(table, index)
    return {name: rows.column(name).to_pylist() for name in rows.column_names}


def values(table: Any, index: Indices, url: str, first: int = 0) -> Columns:
    """The columns of some rows of a table, whose first row is row `first` of the file. Raises PreflightError for nulls,
    and for numbers that are not finite or too large.
    """
    arrow, chunks = library("a Parquet file"), {name: table.column(name).chunks for name in table.column_names}
    plain = {name: each[0] for name, each in chunks.items() if len(each) == 1 and _is_plain(each[0])}
    columns: Columns = {name: _cast(_array(each)[index], kind_of(each.type)) for name, each in plain.items()}
    if others := [name for name in chunks if name not in plain]:
        rows = _rows(table.select(others), index)
        for name in others:
            column = arrow.concat_arrays(rows.column(name).chunks)
            _check_nulls(column, f"data.path={url}: column {name}", first + index)
            columns[name] = _values(column)
    for name, column in columns.items():
        check_finite(column, f"data.path={url}: column {name}", first + index)
    return columns


def _cast(numbers: NDArray[Any], kind: str) -> NDArray[Any]:
    """As the tensors have them. Raises WordsError for whole numbers of 64 bits without a sign that need them all."""
    if numbers.dtype == np.uint64 and numbers.size and numbers.max() >> np.uint64(63):
        raise PreflightError(f"data: a column of whole numbers has {numbers.max()}, and numbers have 63 bits.")
    with np.errstate(over="ignore"):  # what becomes infinite is told with its row
        return numbers.astype(KINDS[kind])


def check_finite(column: Any, what: str, rows: Indices) -> None:
    """Raises PreflightError, with its row, for the first value that has a number that is not finite in fp32."""
    if isinstance(column, np.ndarray) and column.dtype.kind != "O":
        if column.dtype.kind != "f" or np.isfinite(column).all():
            return
    elif not len(column) or isinstance(column[0], str):
        return
    for value, row in zip(column, rows.tolist(), strict=True):
        odd = value if np.ndim(value) == 0 else _first_odd(value)
        if odd is not None and not np.isfinite(odd):
            raise PreflightError(
                f"{what} has {'NaN' if np.isnan(odd) else 'a number that is infinite, or too large for 32 bits'} in "
                f"row {row + 1}. Drop or fill it."
            )


def _first_odd(value: Any) -> Any:
    """The first number of an array that is not finite."""
    odd = np.asarray(value).ravel()
    return next(iter(odd[~np.isfinite(odd)]), None)


def _is_plain(column: Any) -> bool:
    """Whether a column is numbers one after the other, without nulls."""
    from pyarrow import types

    numbers = types.is_floating(column.type) or types.is_integer(column.type)
    return numbers and not column.null_count


def _rows(table: Any, index: Indices) -> Any:
    """Some rows of a table. pyarrow's own ways from numpy and to it import pandas if it is there: 50 MB and 0.5 s."""
    arrow = library("a Parquet file")
    index = np.ascontiguousarray(index, np.int64)
    for place, each in enumerate(table.schema):
        if arrow.types.is_string_view(each.type):  # of which no rows can be taken
            table = table.set_column(place, each.name, table.column(place).cast(arrow.string()))
    return table.take(arrow.Array.from_buffers(arrow.int64(), len(index), [None, arrow.py_buffer(index)]))


def _array(column: Any) -> NDArray[Any]:
    """The numbers of a column without nulls."""
    arrow = library("a Parquet file")
    return np.from_dlpack(column.cast(arrow.uint8()) if arrow.types.is_boolean(column.type) else column)


def _check_nulls(column: Any, what: str, rows: Indices) -> None:
    """Raises PreflightError, with its row, for the first value that is null, or has a null in a list."""
    inner = column
    while not inner.null_count and kind_of(inner.type).startswith("list of "):
        inner = inner.flatten()
    if inner.null_count:
        holed = [value is None or (isinstance(value, list) and "None" in repr(value)) for value in column.to_pylist()]
        where = "" if inner is column else " in a list"
        raise PreflightError(f"{what} has a null{where} in row {rows[holed.index(True)] + 1}. Drop or fill it.")


def _values(column: Any) -> Any:
    """The values of a column without nulls."""
    from pyarrow import types

    kind = kind_of(column.type)
    if kind == "text":
        return column.to_pylist()
    if not kind.startswith("list of "):
        return _numbers(column, kind)
    flat, lengths = column.flatten(), _lengths(column, types)
    if kind.startswith("list of list"):
        inner, ends = _values(flat), np.cumsum(lengths)
        arrays = [np.asarray(inner[end - size : end]) for end, size in zip(ends, lengths, strict=True)]
    else:
        arrays = np.split(_numbers(flat, kind.removeprefix("list of ")), np.cumsum(lengths)[:-1])
    return rowindex.alike(arrays)


def _lengths(lists: Any, types: Any) -> Any:
    if types.is_fixed_size_list(lists.type):
        return np.full(len(lists), lists.type.list_size)
    return _array(lists.value_lengths())


def _numbers(column: Any, kind: str) -> Any:
    arrow = library("a Parquet file")
    if arrow.types.is_decimal(column.type):
        column = column.cast(arrow.int64() if kind == "whole" else arrow.float64())
    return _cast(_array(column), kind)


def class_names(schema: Any) -> dict[str, Sequence[str]]:
    """Column -> the names of its classes, as Hugging Face's datasets notes them in a file."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: each["names"] for name, each in features.items() if each.get("_type") == "ClassLabel"}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def kind_of(of: Any) -> str:
    """The kind of a column of this type, as an index has it."""
    from pyarrow import types

    if types.is_list(of) or types.is_large_list(of) or types.is_fixed_size_list(of):
        return f"list of {kind_of(of.value_type)}"
    if types.is_integer(of) or types.is_boolean(of) or (types.is_decimal(of) and not of.scale and of.precision < 19):
        return "whole"
    if types.is_floating(of) or types.is_decimal(of):
        return "fraction"
    texts = (types.is_string, types.is_large_string, types.is_string_view, types.is_dictionary)
    return "text" if any(is_text(of) for is_text in texts) else str(of)


def _edges(groups: Sequence[Any], number: int) -> list[int] | None:
    """The smallest and largest number of a column of integers, if all row groups tell them."""
    known = [group.column(number).statistics for group in groups if group.num_rows]
    if not known or not all(each is not None and each.has_min_max and isinstance(each.min, int) for each in known):
        return None
    return [int(min(each.min for each in known)), int(max(each.max for each in known))]


def _parsed(url: str, end: bytes) -> Any:
    arrow = library("a Parquet file")
    try:
        return arrow.parquet.read_metadata(arrow.BufferReader(end))
    except (arrow.ArrowException, OSError) as error:
        raise PreflightError(f"data.path={url}: this is no Parquet file: {first_line(error)}") from None
