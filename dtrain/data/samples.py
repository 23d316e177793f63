"""Reads samples of any map-style dataset by index, and makes batches of them.

The generators of Python, numpy and torch are seeded from (i, e) before sample i of pass e is read, and a
`transform(sample, generator)` is given one of its own.
"""

import inspect
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.config.word import spelling
from dtrain.data import Indices
from dtrain.data.collate import Sizes, check_entries, check_range, check_some, fixed_of, stack, tensors
from dtrain.data.order import _mix64
from dtrain.errors import WordsError, first_line, note_sample
from dtrain.lifecycle import loaders

Inputs = int | str | Sequence[str]
Keys = tuple[Inputs, int | str]
Transform = Callable[[Any, torch.Generator | None], Any]
"""(sample, generator of its index and pass; None for a held-out sample) -> sample."""
HERE = "\0"
"""The place of a sample in a message, until that is raised: to find the line of a row, all before it are counted."""
LOOKED_AT = 64
"""Samples by which it is decided which parts are never padded to `data.length`, spread evenly over the dataset."""
SINGLE = (Tensor, np.ndarray, int, float, str, bytes, type(None))
"""Types of a sample that cannot hold an input and a target."""


@dataclass(frozen=True)
class Samples:
    """Reads samples of `dataset` by index, and makes batches of them."""

    dataset: Any
    keys: Keys
    pad: float | None = None
    length: int | None = None
    collate: Callable[[list[Any]], Any] | None = None
    transform: Transform | None = None
    held: bool = False
    """Whether its samples are held out, for which nothing is drawn."""
    where: Callable[[int], str] = "sample {}".format
    """The words for a sample in a message."""
    masks: Sequence[str] = ()
    """The masks that the inputs need, which are created for samples without them."""
    near: int | None = None
    """The first samples that are read together; None: each is read by itself."""

    def one(self, index: int, epoch: int) -> Any:
        """A sample of the user's dataset: the keys that are used, or all of it for the user's collate function."""
        loaders.note(index)
        _seed(index, epoch)
        try:
            sample = self._read(index)
        except Exception as error:
            note_sample(error, f"{self.where(index)}, epoch {epoch}")
            raise
        if self.transform:
            sample = self._transformed(self.transform, sample, index, epoch)
        if self.collate:
            return sample
        try:
            return pick(sample, self.keys, HERE, optional=self.masks)
        except WordsError as error:
            raise self._at(index, error) from error

    def _read(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except IndexError as error:
            size = len(self.dataset)
            raise IndexError(
                f"data.dataset: {type(self.dataset).__name__} has no sample {index}, but its __len__ is {size}, so it "
                f"must have samples 0 to {size - 1} ({error})"
            ) from error

    def batch(self, index: Indices, epoch: Indices) -> tuple[Any, Any, Sizes]:
        """(inputs, targets, sizes): tensors or mappings of tensors, and the lengths of rows that were padded."""
        samples = [self.one(int(i), int(e)) for i, e in zip(index, epoch, strict=True)]
        if self.collate:
            made = pick(self.collate(samples), self.keys, "data.collate: a batch")
            return *converted(made, "data.collate:"), {}
        rows = self._tensors(index, samples)
        try:
            batch = stack(rows, pad=self.pad, length=self.length, masks=self.masks, fixed=self._fixed)
        except WordsError as error:
            if not self.transform:
                raise
            raise WordsError(str(error).replace("data.dataset:", "data.transform:", 1)) from error
        check_range(batch[:2], lambda: self._parts(index, samples))
        return batch

    def _parts(self, index: Indices, samples: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """The parts of samples, with their names."""
        for i, (inputs, targets) in zip(index, samples, strict=True):
            yield f"{self._name(int(i))}: the input", inputs
            yield f"{self._name(int(i))}: the target", targets

    @cached_property
    def _fixed(self) -> set[str] | None:
        """The parts that are never padded: of all samples, as far as some tell; None: of each batch, where no part is
        padded to a length that no sample has.
        """
        if self.pad is None or self.length is None:
            return None
        count = self.near or len(self.dataset)
        index = np.unique(np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(np.int64))
        samples = self._tensors(index, [self.one(int(i), 0) for i in index])
        return fixed_of(*zip(*samples, strict=True))

    def _tensors(self, index: Indices, samples: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Samples as tensors. Raises WordsError, with its name, for one that is none."""
        rows = list[tuple[Any, Any]]()
        for i, sample in zip(index, samples, strict=True):
            try:
                row = converted(sample, f"{HERE}:")
                check_entries(row[0], f"{HERE}:")
                if self.pad is not None:
                    check_some(row[0], HERE)
            except WordsError as error:
                raise self._at(int(i), error) from error
            rows.append(row)
        return rows

    def _at(self, index: int, error: WordsError) -> WordsError:
        """The error with the name of its sample."""
        return WordsError(str(error).replace(HERE, self._name(index)))

    def _name(self, index: int) -> str:
        """A sample in a message: what the dataset gives, or what the transform makes of it."""
        if self.transform:
            return f"data.transform: what it returns for {self.where(index)}"
        return f"data.dataset: {self.where(index)}"

    def _transformed(self, transform: Transform, sample: Any, index: int, epoch: int) -> Any:
        """Raises WordsError, with the sample and the place in the user's code, if the transform raises."""
        try:
            return transform(sample, None if self.held else generator(index, epoch))
        except WordsError:
            raise
        except Exception as error:
            code = traceback.extract_tb(error.__traceback__)[-1]
            raise WordsError(
                f"data.transform fails for {self.where(index)}, epoch {epoch} ({type(error).__name__}: "
                f"{first_line(error)}, in {code.filename}:{code.lineno}). It is called with "
                "(sample, generator) and returns a sample."
            ) from error


def check_call(transform: Transform) -> None:
    """Raises WordsError for a transform that does not take two arguments."""
    try:
        takes = inspect.signature(transform)
    except (TypeError, ValueError):  # one that is not written in Python
        return
    try:
        takes.bind(None, None)
    except TypeError:
        name = getattr(transform, "func", transform)
        raise WordsError(
            f"data.transform: {getattr(name, '__qualname__', type(name).__name__)}{takes} cannot be called with "
            "(sample, generator). Let it take both; a function of the sample alone ignores the second."
        ) from None


def names(inputs: Inputs) -> Sequence[str]:
    return [] if isinstance(inputs, int | str) else inputs


def pick(sample: Any, keys: Keys, name: str, *, optional: Sequence[str] = ()) -> tuple[Any, Any]:
    """(input, target) of a sample, or of a batch. Raises WordsError, with its `name`, for a missing key, unless it is
    one of `optional`, and for a sample that is one array or row: its entries are no parts.
    """
    inputs, target = keys
    if isinstance(sample, SINGLE) or (isinstance(sample, list) and keys == (0, 1) and _is_row(sample)):
        kind = "None" if sample is None else f"one {type(sample).__name__}"
        raise WordsError(
            f"{name} is {kind}, without a target. Return (input, target); for rows of tokens return (row, row) and "
            "type data.shift=true."
        )
    named = sample
    if isinstance(sample, tuple) and hasattr(sample, "_asdict") and not isinstance(target, int):
        named = sample._asdict()
    try:
        if isinstance(inputs, int | str):
            return named[inputs], named[target]
        return {key: named[key] for key in inputs if key not in optional or key in named}, named[target]
    except (KeyError, IndexError, TypeError):
        has = f"{len(sample)} parts" if isinstance(sample, Sequence) else type(sample).__name__
        if isinstance(sample, Mapping):
            has = ", ".join(map(str, sample))
            if keys == (0, 1):
                raise WordsError(
                    f"{name} has {has}. Type data.inputs=<the name of the input> data.targets=<the name of "
                    "the target>; data.inputs=[<names>] gives several to the model, by name."
                ) from None
        raise WordsError(
            f"{name} has {has}. data.inputs={spelling(inputs)} and data.targets={target} must name two of these."
        ) from None


def _is_row(sample: list[Any]) -> bool:
    """Whether it is a row, such as of tokens: more than a pair of numbers."""
    return len(sample) > 2 and isinstance(sample[0], Number)


def converted(pair: tuple[Any, Any], where: str) -> tuple[Any, Any]:
    """(input, target) as tensors."""
    return tensors(pair[0], f"{where} the input"), tensors(pair[1], f"{where} the target")


def generator(index: int, epoch: int) -> torch.Generator:
    """The generator of a sample in a pass: the same on every mesh, in every process and after a restart."""
    return torch.Generator().manual_seed(_mix64(_mix64(_mix64(index) ^ epoch)) >> 1)


def _seed(index: int, epoch: int) -> None:
    value = _mix64(_mix64(index) ^ epoch)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value >> 1)
