"""Rows of files as samples: files of one kind, one after another, with one numbering of their rows."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dtrain.data import IGNORE
from dtrain.data.dataset import MOST_CLASSES, Dataset, too_many
from dtrain.data.samples import Transform
from dtrain.data.shift import ENOUGH
from dtrain.data.split import Scattered, Split
from dtrain.errors import PreflightError, WordsError
from dtrain.storage import rowfile, rowindex, rowlengths
from dtrain.storage.linekinds import EXACT, TYPES
from dtrain.storage.rowfile import Reader, columns_of, kinds
from dtrain.storage.rowindex import File, Indices

Pattern = str | Sequence[str]
Form = Literal["auto", "column", "mapping"]


class Rows(Dataset):
    """A Source of the rows of files. `inputs`: columns, all but `targets` if None. `targets` None: rows have none, and
    IGNORE stands for them. `split` divides the first
    rows of the opened files, and their number; by default those to hold out come from everywhere. `packed`: rows have
    different lengths, and are read by `tokens`. `bucket`: the batches among which they are sorted by length.
    """

    def __init__(
        self, reader: Reader, path: Pattern, *, inputs: Pattern | None, targets: str | None, holdout: float,
        shift: bool = False, outputs: int | None = None, pad: float | None = None, length: int | None = None,
        transform: Transform | None = None, split: Callable[[Sequence[File], int], Split] | None = None,
        packed: bool = False, bucket: int | None = None,
    ) -> None:  # fmt: skip
        urls, self._unread = reader.matched(path)
        words = {"inputs": inputs, "targets": targets, "pad": pad}
        columns = columns_of(reader, urls[0], words)
        files = reader.opened(urls, columns, rowfile.alone(columns, words))
        named = [inputs] if isinstance(inputs, str) else inputs
        named = columns[:-1] if named is None else named
        masks = [name for name in named if name not in columns]
        form: Form = "mapping" if masks else "auto"
        form = "column" if isinstance(inputs, str) else form
        table = Table(files, [name for name in named if name in columns], targets, form)
        if not len(table):
            raise PreflightError(f"data.path={urls[0]}: there is no row in {len(files)} file(s).")
        self._files, self._seen, self._table, self._cache = files, len(table), table, reader.cache
        self._packed, self.bucket = packed, bucket
        self._split_of = split or (lambda files, rows: Scattered.of(rows, holdout))
        super().__init__(
            table, shift=shift, outputs=outputs, pad=pad, length=length, transform=transform, columns=pad is None,
            split=self._split_of(files, len(table)), where=table.where, masks=masks, near=table.near,
        )  # fmt: skip

    @property
    def fingerprint(self) -> str:
        return rowfile.fingerprint(self._files, self._seen)

    @property
    def notes(self) -> list[str]:
        """Sentences about what is read otherwise than one may think."""
        sentences = [*self._unread]
        if rounded := self._table.rounded:
            sentences.append(
                f"data: {rounded}, and beside fractions whole numbers become fp32, which has all of them up to "
                f"{EXACT}. If it is an id, give it a column of its own, and name that alone: data.inputs=<the column>"
            )
        return sentences

    @property
    def part(self) -> Split:
        """The rows that are trained on."""
        return self._split

    @property
    def ends(self) -> Indices:
        """The number of rows up to the end of each block."""
        return self._table.ends

    @property
    def facts(self) -> Mapping[str, Any]:
        """Without the shape of a sample if rows have different lengths."""
        if not self._packed:
            known = super().facts
            return known if "outputs" in known else {**known, "unknown": self._table.unknown}
        return {"outputs": self._outputs, "vocab": self._outputs} if self._outputs else {}

    def lengths_of(self, split: Split) -> NDArray[np.int32]:
        """The number of tokens of each row of a split. Raises WordsError if rows are not of tokens."""
        return self._lengths[split.original(np.arange(len(split)))]

    def sizes(self, index: Indices) -> Indices:
        """The length of the lists of samples, those of the first input that has some."""
        return self._sizes[self.original(index)]

    @cached_property
    def _sizes(self) -> Indices:
        name = rowfile.lists_of(self._files, self._table.columns)
        return np.concatenate([rowlengths.of(file, name, self._cache) for file in self._files]).astype(np.int64)

    @cached_property
    def _lengths(self) -> NDArray[np.int32]:
        names = self._table.columns
        rowfile.check_tokens(self._files, names)
        lengths = np.concatenate([rowlengths.of(file, names[0], self._cache) for file in self._files])
        if self._shift:
            rowlengths.check_shift(lengths)
        return lengths

    def tokens(self, index: Indices) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """(tokens, targets) of rows, for rows of different lengths. Raises WordsError for targets that are not one per
        token.
        """
        name, *_, target = [*self._table.columns, self._table.columns[-1]]
        columns = self._table.lists(index)
        for row, tokens, targets in zip(index.tolist(), columns[name], columns[target], strict=True):
            if np.ndim(tokens) != 1:
                raise WordsError(
                    f"data: row {row} has tokens of the shape {[*np.shape(tokens)]}. Name a column of lists."
                )
            if len(targets) != len(tokens):
                raise WordsError(
                    f"data: row {row} has {len(tokens)} tokens of {name}, but {len(targets)} of {target}. A packed row "
                    "has one target per token."
                )
            if not self._shift:
                yield tokens, targets
                continue
            if len(tokens) > ENOUGH and np.array_equal(targets[:-1], tokens[1:]) and len({*tokens.tolist()}) > 1:
                raise WordsError(
                    "data.shift=true: the targets of these samples are the next tokens already. Leave it out."
                )
            yield tokens, np.append(targets[1:], IGNORE)

    def as_of(self, fingerprint: str) -> list[str] | None:
        rows = re.fullmatch(r"rows-(\d+)-\w+", fingerprint)
        if not rows or not 0 < int(rows[1]) < len(self._samples.dataset):
            return None
        if rowfile.fingerprint(self._files, int(rows[1])) != fingerprint:
            return None
        if self._seen != int(rows[1]):
            self._seen = int(rows[1])
            self._table.describe(self._seen)
            self.resplit(self._split_of(self._files, self._seen))
        return [
            f"{len(self._samples.dataset) - self._seen} rows were added since this run began, which goes on with the "
            f"{self._seen} that it has. To train on all type out=<another place>."
        ]


class Table:
    """A map-style dataset of (input, target). Columns of one number each are one vector, of int64 if all of them are
    whole, else of fp32; several others are a mapping. `form`: a `column` that was named alone is the input itself, but
    a fraction stays a vector of one; several are a `mapping`.
    """

    def __init__(self, files: Sequence[File], inputs: Sequence[str], target: str | None, form: Form = "auto") -> None:
        self._inputs, self._target, self._files, self._form = inputs, target, files, form
        self._blocks = [(file, block) for file in files for block in range(len(file.facts["sizes"]))]
        self.columns = [*dict.fromkeys([*inputs, *_one(target)])]
        """Inputs, then the target."""
        self.ends = np.cumsum([size for file in files for size in file.facts["sizes"]])
        self.classes: int | None = None
        self.describe(len(self))

    def describe(self, rows: int) -> None:
        """Take the types and classes of the first rows alone."""
        facts, left = list[Mapping[str, Any]](), rows
        for file in self._files:
            size = sum(file.facts["sizes"])
            if left > 0 and size:
                facts.append(file.first(min(left, size)))
            left -= size
        self._facts = facts
        self._kinds = kinds(facts, self.columns, text=False)
        target = self._target
        self.classes = _classes(facts, target) if target and self._kinds[target] == "whole" else None

    @property
    def near(self) -> int:
        """The rows of the first block that has some."""
        return next((size for file in self._files for size in file.facts["sizes"] if size), 0)

    @property
    def rounded(self) -> str:
        """The column of whole numbers that fractions in it or beside it make fp32, and its largest, if rounded."""
        kinds = {name: self._kinds[name] for name in self._inputs}
        is_vector = {*kinds.values()} == TYPES.keys()
        for name in (name for name, kind in kinds.items() if is_vector or kind.endswith("fraction")):
            edges = [each[edge].get(name, 0) for each in self._facts for edge in ("smallest", "largest")]
            most = max(map(abs, [*edges, *(each.get("wholes", {}).get(name, 0) for each in self._facts)]), default=0)
            if most > EXACT:
                return f"column {name} has {most}"
        return ""

    @property
    def unknown(self) -> str:
        """Why the number of classes is not known, and what to type."""
        name, least = self._target, min((each["smallest"].get(str(self._target), 0) for each in self._facts), default=0)
        if self._kinds[str(name)].startswith("list"):
            return (
                f"column {name} has lists: a class is one whole number, such as 2 for the one-hot [0, 0, 1]. If each "
                "of their numbers is a class, type data.outputs=<number of classes>."
            )
        if least == IGNORE:
            return f"column {name} has {IGNORE}, a target that does not count. Type data.outputs=<number of classes>."
        if least < 0:
            return (
                f"column {name} has {least}, and classes are whole numbers from 0 on ({IGNORE}: a target that does not "
                "count). Number the classes from 0 on."
            )
        if self.classes and self.classes > MOST_CLASSES:
            return too_many(f"column {name} has {self.classes - 1}", self.classes)
        return f"the files do not say how many classes column {name} has. Type data.outputs=<number of classes>."

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int | Tensor) -> tuple[Any, Any]:
        """One row, or the columns of several."""
        if isinstance(index, Tensor):
            return self._sample(index.numpy())
        if not 0 <= index < len(self):
            raise IndexError(index)
        inputs, target = self._sample(np.array([index]))
        return {name: part[0] for name, part in inputs.items()} if isinstance(inputs, dict) else inputs[0], target[0]

    def where(self, index: int) -> str:
        """The file of a row, and its place there."""
        for file in self._files:
            size = sum(file.facts["sizes"])
            if index < size:
                return f"{file.url}, {file.where(index)}"
            index -= size
        raise IndexError(index)

    def lists(self, index: Indices) -> dict[str, list[Any]]:
        """The columns of rows, each a list of their values."""
        parts, back = self._parts(index)
        rows = {name: [row for part in parts for row in part[name]] for name in self._kinds}
        return {name: [each[place] for place in back] for name, each in rows.items()}

    def _sample(self, index: Indices) -> tuple[Any, Any]:
        columns = self._read(index)
        targets = columns[self._target] if self._target else np.full(len(index), IGNORE)
        kinds = {self._kinds[name] for name in self._inputs}
        if kinds <= TYPES.keys() and not (self._form == "column" and kinds == {"whole"}):
            rows = np.stack([columns[name] for name in self._inputs], 1)
            return rows.astype(np.int64 if kinds == {"whole"} else np.float32, copy=False), targets
        if len(self._inputs) == 1 and self._form != "mapping":
            return columns[self._inputs[0]], targets
        return {name: columns[name] for name in self._inputs}, targets

    def _read(self, index: Indices) -> dict[str, Any]:
        parts, back = self._parts(index)
        return {name: self._joined(name, [part[name] for part in parts], back) for name in self._kinds}

    def _parts(self, index: Indices) -> tuple[list[dict[str, Any]], Indices]:
        """(the columns of these rows in each block, where each row is among them)."""
        owner = np.searchsorted(self.ends, index, side="right")
        order, parts = list[NDArray[Any]](), list[dict[str, Any]]()
        for number in np.unique(owner).tolist():
            here = np.flatnonzero(owner == number)
            file, block = self._blocks[number]
            begin = int(self.ends[number - 1]) if number else 0
            order.append(here)
            parts.append(file.read(block, index[here] - begin))
        return parts, np.argsort(np.concatenate(order))

    def _joined(self, name: str, parts: list[Any], back: Indices) -> Any:
        kind = np.float32 if self._kinds[name].endswith("fraction") else np.int64
        if all(isinstance(part, np.ndarray) and part.shape[1:] == parts[0].shape[1:] for part in parts):
            column = np.concatenate(parts)[back].astype(kind, copy=False)
        else:
            rows = [row for part in parts for row in part]
            column = rowindex.alike([np.asarray(rows[place], kind) for place in back])
        if isinstance(column, list):
            lengths = [len(row) for row in column]
            raise WordsError(
                f"data: the rows of {name} have different lengths, {min(lengths)} to {max(lengths)}. Type "
                "data.pad=<the padding token>."
            )
        return column


def _one(name: str | None) -> list[str]:
    return [] if name is None else [name]


def _classes(facts: Sequence[Mapping[str, Any]], target: str) -> int | None:
    """One more than the largest whole number of the target, if all files tell it and none is negative."""
    if not facts or any(target not in each["largest"] or each["smallest"][target] < 0 for each in facts):
        return None
    return 1 + max(int(each["largest"][target]) for each in facts)
