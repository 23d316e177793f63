"""Rows of files as samples: files of one kind, one after another, with one numbering of their rows."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dtrain.chat.rowtext import RowText
from dtrain.data import IGNORE
from dtrain.data.dataset import MOST_CLASSES, Dataset, too_many
from dtrain.data.samples import Transform
from dtrain.data.shift import ENOUGH
from dtrain.data.split import Scattered, Split
from dtrain.errors import PreflightError, WordsError
from dtrain.files import rowfile, rowindex, rowlengths
from dtrain.files.linekinds import EXACT, TYPES
from dtrain.files.rowfile import Reader, columns_of, kinds
from dtrain.files.rowindex import File, Indices
from dtrain.files.wordfile import WordFile, classes_of, doubtful_of, numbers_of
from dtrain.storage import caching

Pattern = str | Sequence[str]
Form = Literal["auto", "column", "mapping"]
LOOKED_AT = 512
"""Rows of text by which it is told how many are cut."""


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
        table = Table(files, [name for name in named if name in columns], targets, reader.cache, form)
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
        if cut := self._table.cut:
            sentences.append(f"data: {cut}")
        if doubtful := doubtful_of(self._table.classes):
            sentences.append(f"data: column {self._table.columns[-1]} has {doubtful}")
        return sentences

    def as_classes(self, names: Sequence[str]) -> None:
        """Number the classes as those of training, which have these `names`, and not as these files alone would.
        Raises WordsError for a class that training does not have, when it is read.
        """
        self._table.number(names)

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
    a fraction stays a vector of one; several are a `mapping`. A target of words is their place among all, sorted.
    """

    def __init__(
        self, files: Sequence[File], inputs: Sequence[str], target: str | None, cache: Path, form: Form = "auto"
    ) -> None:
        self._inputs, self._target, self._files, self._form, self._cache = inputs, target, files, form, cache
        self._blocks = [(file, block) for file in files for block in range(len(file.facts["sizes"]))]
        self.columns = [*dict.fromkeys([*inputs, *_one(target)])]
        """Inputs, then the target."""
        self.ends = np.cumsum([size for file in files for size in file.facts["sizes"]])
        self.classes: int | Sequence[str] | None = None
        """The names of the classes, or their number."""
        self._places: Mapping[str, int] = {}
        """Word of the target -> its class."""
        self.describe(len(self))

    def describe(self, rows: int) -> None:
        """Take the types and classes of the first rows alone."""
        parts, left = list[tuple[File, int]](), rows
        for file in self._files:
            size = sum(file.facts["sizes"])
            if left > 0 and size:
                parts.append((file, min(left, size)))
            left -= size
        self._facts = [file.first(size) for file, size in parts]
        self._kinds = kinds(self._facts, self.columns, text=False, target=self._target)
        target = self._target
        if target and self._kinds[target] == "text":
            words = {word for file, size in parts for word in classes_of(file, target, self._cache, size)}
            self.number(sorted(words))
        elif target and self._kinds[target] == "whole":
            self.classes = _classes(self._facts, target)

    def number(self, names: Sequence[str]) -> None:
        """Give the words of the target the classes with these names."""
        if self._target and self._kinds[self._target] == "text":
            self.classes, self._places = names, {name: number for number, name in enumerate(names)}

    @property
    def cut(self) -> str:
        """How many rows of text lose their end, of some that are spread over all; empty if none does."""
        file = next((file for file in self._files if isinstance(file, WordFile)), None)
        if file is None or not len(self):
            return ""
        rows = np.unique(np.linspace(0, len(self) - 1, min(len(self), LOOKED_AT)).astype(np.int64))
        count = 0
        for (each, block), index, _ in self._in_blocks(rows):
            texts = each.texts(block, index) if isinstance(each, WordFile) else []
            count += sum(map(file.encoder.is_cut, texts))
        if not count:
            return ""
        return (
            f"of {len(rows)} rows {count} have more than {file.encoder.most} tokens and lose their end; data.sequence="
            "<the most tokens of a row> sets that"
        )

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
        if isinstance(self.classes, int) and self.classes > MOST_CLASSES:
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
        if self._places:
            targets = numbers_of(targets, self._places, f"data: column {self._target}")
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
        order, parts = list[NDArray[Any]](), list[dict[str, Any]]()
        for (file, block), rows, here in self._in_blocks(index):
            order.append(here)
            parts.append(file.read(block, rows))
        return parts, np.argsort(np.concatenate(order))

    def _in_blocks(self, index: Indices) -> Iterator[tuple[tuple[File, int], Indices, Indices]]:
        """(file and block, the places of rows in it, their places in `index`) of each block that has some."""
        owner = np.searchsorted(self.ends, index, side="right")
        for number in np.unique(owner).tolist():
            here = np.flatnonzero(owner == number)
            yield self._blocks[number], index[here] - (int(self.ends[number - 1]) if number else 0), here

    def _joined(self, name: str, parts: list[Any], back: Indices) -> Any:
        if self._kinds[name] == "text":
            words = [row for part in parts for row in part]
            return [words[place] for place in back]
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


def reader(
    format: str, cache: str | None, inputs: Pattern | None, tokenizer: str | None, most: int | None, **more: Any
) -> Reader:
    """The reader of files of rows, whose column of text the `tokenizer` makes at most so many tokens of. Raises
    PreflightError.
    """
    if tokenizer is None:
        return Reader(format, caching.folder(cache), **more)
    encoder, texts = RowText(tokenizer, most), [inputs] if isinstance(inputs, str) else list(inputs or ())
    return Reader(format, caching.folder(cache), texts=texts, encoder=encoder, **more)


def _one(name: str | None) -> list[str]:
    return [] if name is None else [name]


def _classes(facts: Sequence[Mapping[str, Any]], target: str) -> int | Sequence[str] | None:
    """The names of the classes, if all files have the same; else one more than the largest whole number of the target,
    if all files tell it and none is negative.
    """
    named = [each.get("classes", {}).get(target) for each in facts]
    if named and named[0] and all(each == named[0] for each in named):
        return list(named[0])
    if not facts or any(target not in each["largest"] or each["smallest"][target] < 0 for each in facts):
        return None
    return 1 + max(int(each["largest"][target]) for each in facts)
