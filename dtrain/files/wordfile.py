"""Text in files of rows: a column that is read as tokens, and columns of words that are classes."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import PreflightError, WordsError
from dtrain.files import rowindex
from dtrain.files.rowindex import Columns, File, Indices

ROWS = 4096
"""Rows that are read at once."""
MOST = 10_000
"""Words that are taken for classes, at most."""
MISSING = ("na", "n/a", "nan", "null")
"""Words that hardly ever name a class."""


class Encoder(Protocol):
    """A tokenizer of rows of text."""

    @property
    def most(self) -> int | None:
        """The most tokens of a row; None: a row has all of its own."""
        ...

    @property
    def digest(self) -> str:
        """Of all that decides about the tokens of a text."""
        ...

    def tokens(self, text: str) -> NDArray[np.int64]: ...

    def is_cut(self, text: str) -> bool:
        """Whether the text has more tokens than a row may have."""
        ...


@dataclass(frozen=True)
class WordFile:
    """The rows of `file`, whose `column` of text is read as lists of tokens. Raises WordsError if it has none."""

    file: File
    column: str
    encoder: Encoder

    @property
    def url(self) -> str:
        return self.file.url

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        return self._with_tokens(self.file.facts)

    def digest(self, rows: int | None = None) -> str:
        inner = self.file.digest(rows)
        return hashlib.sha256(f"{inner}{self.encoder.digest}".encode()).hexdigest() if inner else ""

    def first(self, rows: int) -> Mapping[str, Any]:
        return self._with_tokens(self.file.first(rows))

    def read(self, block: int, index: Indices) -> Columns:
        columns = self.file.read(block, index)
        return columns | {self.column: rowindex.alike([*map(self.encoder.tokens, columns[self.column])])}

    def where(self, row: int) -> str:
        return self.file.where(row)

    def texts(self, block: int, index: Indices) -> list[str]:
        """The text of rows."""
        return list(self.file.read(block, index)[self.column])

    def _with_tokens(self, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = facts["kinds"].get(self.column, "text")
        if kind != "text":
            raise WordsError(
                f"data.tokenizer: column {self.column} of {self.url} holds {kind}, not text. Type data.inputs=<a "
                "column of text>, or leave data.tokenizer out."
            )
        digest = hashlib.sha256(f"{facts['sha256']}{self.encoder.digest}".encode()).hexdigest()
        return {**facts, "kinds": {**facts["kinds"], self.column: "list of whole"}, "sha256": digest}


def classes_of(file: File, column: str, cache: Path, rows: int) -> list[str]:
    """The different words in a column of the first rows of a file, sorted: found once, and kept beside its index.
    Raises StoreError, and PreflightError if they are too many to be classes.
    """
    inner = file.file if isinstance(file, WordFile) else file

    def made(stem: Path) -> Mapping[str, Any]:
        found, first = set[str](), 0
        for block, size in enumerate(inner.facts["sizes"]):
            for start in range(0, min(size, rows - first), ROWS):
                index = np.arange(start, min(start + ROWS, size, rows - first))
                found.update(map(str, inner.read(block, index)[column]))
                if len(found) > MOST:
                    raise PreflightError(
                        f"data.path={file.url}: column {column} has more than {MOST} different texts, too many for "
                        "classes. Type data.targets=<a column of classes>."
                    )
            first += size
        return {"sizes": [rows], "sha256": inner.digest(rows), "kinds": {}, "words": sorted(found)}

    how: Sequence[Any] = ["words", column, rows, inner.digest(rows)]
    words: list[str] = rowindex.kept(cache, file.url, how, made)[0]["words"]
    return words


def doubtful_of(names: Any) -> str:
    """The first classes that differ by spaces or capitals alone, or one that seems to be a missing value, in words."""
    same = dict[str, str]()
    for name in names if isinstance(names, Sequence) else ():
        other = same.setdefault(name.strip().lower(), name)
        if other != name:
            return f"the classes {other!r} and {name!r}, which differ by spaces or capitals alone"
        if name.strip().lower() in MISSING:
            return f"the class {name!r}. If no value is meant by it, leave these rows out"
    return ""


def numbers_of(words: Iterable[Any], classes: Mapping[str, int], where: str) -> NDArray[np.int64]:
    """The classes of words. Raises WordsError for one that is none."""
    words = list(words)
    unknown = next((word for word in words if word not in classes), None)
    if unknown is not None:
        raise WordsError(f"{where} has {json.dumps(unknown)}, which is no class of training: {', '.join(classes)}.")
    return np.array([classes[word] for word in words], np.int64)
