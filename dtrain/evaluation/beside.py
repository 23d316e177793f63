"""Columns beside an answer of `dtrain predict`: the file of an image, the target of the row, and what was asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dtrain import secrets
from dtrain.config.facts import about
from dtrain.data import Indices, Source
from dtrain.data.pictures import Pictures
from dtrain.errors import WordsError
from dtrain.files import rowfile, rowindex
from dtrain.files.rowindex import File
from dtrain.planned import Part

Columns = dict[str, list[Any]]
PLAIN = (str, int, float, bool, list, dict, type(None))
"""Types of values that JSON has."""


def beside(source: Source, part: Part, wanted: Sequence[str], trained: Sequence[str]) -> Callable[[Indices], Columns]:
    """The columns beside the answers to rows, by their numbers: the target, if `part` of data has one, and `wanted`
    columns. `trained`: the names of the classes. Raises WordsError for columns that are not there.
    """
    if has_rows(part):
        return _of_files(part, wanted)
    if wanted:
        raise WordsError("predict.columns: only rows of csv, jsonl, parquet and hf files have columns. Leave it out.")
    if isinstance(source, Pictures):
        return lambda rows: source.described(rows, trained)
    return lambda rows: {}


def has_rows(part: Part) -> bool:
    """Whether the samples of a part of data are rows of files, with columns."""
    format = about(part).get("files") if str(part["_target_"]).startswith("dtrain.data.") else None
    return format in rowfile.SUFFIXES and part.get("packing") != "pack"


def _of_files(part: Part, wanted: Sequence[str]) -> Callable[[Indices], Columns]:
    """Columns of files of rows, as they are there."""
    path, target = secrets.opened(part["path"]), part.get("targets")
    reader = replace(rowfile.reader_of(part, path, about(part)["files"]), raw=True, texts=())
    urls = reader.found(path)
    there = reader.names(urls[0])
    for name in wanted:
        rowindex.column(name, there, f"predict.columns: {urls[0]}")
    named = {**({"target": target} if target in there else {}), **{name: name for name in wanted}}
    files = reader.opened(urls, [*dict.fromkeys(named.values())]) if named else []
    classes = [file.facts.get("classes", {}).get(target) for file in files]

    def columns(rows: Indices) -> Columns:
        read = _read(files, rows) if files else {}
        told = {name: [_plain(value) for value in read[column]] for name, column in named.items()}
        if "target" in told and classes and classes[0]:
            told["target"] = [value if value is None else classes[0][value] for value in told["target"]]
        return told

    return columns


def _read(files: Sequence[File], rows: Indices) -> Mapping[str, list[Any]]:
    """The columns of rows, whose numbers ascend."""
    blocks = [(file, block) for file in files for block in range(len(file.facts["sizes"]))]
    ends = np.cumsum([size for file in files for size in file.facts["sizes"]])
    found: Columns = {}
    owner = np.searchsorted(ends, rows, side="right")
    for number in dict.fromkeys(owner.tolist()):
        file, block = blocks[number]
        here = rows[owner == number] - (ends[number - 1] if number else 0)
        for name, values in file.read(block, here).items():
            found.setdefault(name, []).extend(values)
    return found


def _plain(value: Any) -> Any:
    return value if isinstance(value, PLAIN) else str(value)
