"""Any map-style dataset as a Source: `__len__`, `__getitem__`, nothing to inherit.

Augmentation is reproducible: the generators of Python, numpy and torch are seeded from (i, e) before sample i of pass e
is read, and a `transform(sample, generator)` is given one of its own.
"""

import hashlib
import inspect
import random
import traceback
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dtrain.data import IGNORE, Batch, Indices, Loading
from dtrain.data.collate import MASK, check_entries, check_some, joined, stack, tensors, tree
from dtrain.data.order import _mix64
from dtrain.data.shift import next_targets
from dtrain.data.split import Scattered, Split
from dtrain.data.workers import Workers
from dtrain.errors import WordsError, an, first_line
from dtrain.lifecycle import loaders

Inputs = int | str | Sequence[str]
Keys = tuple[Inputs, int | str]
Transform = Callable[[Any, torch.Generator | None], Any]
"""(sample, generator of its index and pass; None for a held-out sample) -> sample."""
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

    def one(self, index: int, epoch: int) -> Any:
        """A sample of the user's dataset: the keys that are used, or all of it for the user's collate function."""
        loaders.note(index)
        _seed(index, epoch)
        try:
            sample = self.dataset[index]
        except IndexError as error:
            size = len(self.dataset)
            raise IndexError(
                f"data.dataset: {type(self.dataset).__name__} has no sample {index}, but its __len__ is {size}, so it "
                f"must have samples 0 to {size - 1} ({error})"
            ) from error
        if self.transform:
            sample = self._transformed(self.transform, sample, index, epoch)
        optional = MASK if self.pad is not None else None
        return sample if self.collate else _pick(sample, self.keys, self._name(index), optional=optional)

    def batch(self, index: Indices, epoch: Indices) -> tuple[Any, Any]:
        """(inputs, targets), tensors or mappings of tensors."""
        samples = [self.one(int(i), int(e)) for i, e in zip(index, epoch, strict=True)]
        if self.collate:
            return _converted(_pick(self.collate(samples), self.keys, "data.collate: a batch"), "data.collate:")
        converted = [_converted(each, f"{self._name(int(i))}:") for i, each in zip(index, samples, strict=True)]
        for i, (inputs, _) in zip(index, converted, strict=True):
            check_entries(inputs, f"{self._name(int(i))}:")
            if self.pad is not None:
                check_some(inputs, self._name(int(i)))
        masked = self.pad is not None and MASK in _names(self.keys[0])
        try:
            return stack(converted, pad=self.pad, length=self.length, masked=masked)
        except WordsError as error:
            if not self.transform:
                raise
            raise WordsError(str(error).replace("data.dataset:", "data.transform:", 1)) from error

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
                f"data.transform fails for {self.where(index)} ({type(error).__name__}: {first_line(error)}, in "
                f"{code.filename}:{code.lineno}). It is called with (sample, generator) and returns a sample."
            ) from error


class Dataset:
    """A Source of a map-style dataset. `inputs` and `targets` are the keys of a sample, in a tuple or a mapping;
    several inputs stay a mapping. `workers` processes read samples; 0 means this process. `columns`: the dataset gives
    the columns of many samples by a tensor of their indices, in any thread. `split`: which samples; `held`: they are
    held out.

    `transform` changes each sample. Rows of different lengths are padded with `pad`, to the longest of a batch or to
    `length`; or `collate` makes a batch of a list of samples. `holdout` is a fraction; at least one sample is held out
    and one is not. Raises WordsError if the object is not map-style or a sample lacks a key.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        holdout: float = 0.1,
        holdout_dataset: Any = None,
        inputs: Inputs | None = None,
        targets: int | str | None = None,
        shift: bool = False,
        outputs: int | None = None,
        pad: float | None = None,
        length: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        transform: Transform | None = None,
        workers: int = 0,
        columns: bool = False,
        split: Split | None = None,
        held: bool = False,
        where: Callable[[int], str] = "sample {}".format,
    ) -> None:
        if isinstance(dataset, IterableDataset | str) or not (hasattr(dataset, "__len__") and _has_getitem(dataset)):
            raise WordsError(
                f"data.dataset: {type(dataset).__name__} is not map-style: it needs __len__ and __getitem__. "
                f"{_remedy(dataset)}"
            )
        self._whole, self._shift = _length(dataset), shift
        if self._whole < 1:
            raise WordsError(f"data.dataset: {type(dataset).__name__} has no samples.")
        about = getattr(type(dataset), "about", None)
        stated = about.get("samples") if isinstance(about, dict) and split is None else None
        if stated not in (None, self._whole):
            raise WordsError(
                f"data.dataset: {type(dataset).__name__} states samples = {stated} in its about, but its __len__ is "
                f"{self._whole}. Make them equal, or leave out samples in about."
            )
        if workers < 0:
            raise WordsError(f"data.workers={workers} must be >= 0. Type data.workers=0 for no extra processes.")
        if collate is not None and not callable(collate):
            raise WordsError(
                f"data.collate: {an(collate)} cannot be called with a list of samples. Name a function, "
                "or a class with __call__."
            )
        if transform is not None and not callable(transform):
            raise WordsError(
                f"data.transform: {an(transform)} cannot be called with (sample, generator). Name a "
                "function, or a class with __call__."
            )
        if transform is not None:
            _check_call(transform)
        keys = (0 if inputs is None else inputs, 1 if targets is None else targets)
        self._samples = Samples(dataset, keys, pad, length, collate, transform, held, where)
        columns = columns and transform is None
        self._kept, self._outputs, self._workers = holdout_dataset, outputs, workers
        self._split = split or Scattered.of(self._whole, holdout if holdout_dataset is None else 0)
        self._columns = columns
        self._batched = columns or (isinstance(dataset, TensorDataset) and collate is None and transform is None)
        self.loading: Loading = "thread" if workers or columns else "step"
        if self._batched and not columns:
            self.loading = "block"
        self.dense = False

    @property
    def facts(self) -> Mapping[str, Any]:
        batch = self.take(np.array([0]), np.array([0]))
        inputs, facts = batch["inputs"], dict[str, Any]()
        if isinstance(inputs, Tensor):
            facts = {"inputs": list(inputs.shape[1:]), "kind": str(inputs.dtype).removeprefix("torch.")}
        classes, targets = _classes(self._samples.dataset), batch["targets"]
        if self._outputs and classes and 1 < self._outputs < classes:
            raise WordsError(
                f"data.outputs={self._outputs}: the dataset has {classes} classes. Type data.outputs={classes}, or "
                "leave it out."
            )
        outputs = self._outputs or classes
        if outputs is None and isinstance(targets, Tensor) and targets.is_floating_point():
            outputs = targets[0].numel()
        facts |= {"outputs": outputs, "vocab": outputs} if outputs else {}
        return facts | ({"class_names": self.class_names} if self.class_names else {})

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes, if the user's dataset has them."""
        classes: Any = getattr(self._samples.dataset, "classes", None)
        is_list = isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
        return list(classes) if is_list else None

    @cached_property
    def fingerprint(self) -> str:
        first, again = (repr([self._samples.one(index, 0) for index in (0, self._whole - 1)]) for _ in range(2))
        # samples that use a random generator of their own differ each time they are read
        digest = hashlib.sha256(first.encode()).hexdigest()[:16] if first == again else "random"
        return f"{type(self._samples.dataset).__name__}-{self._whole}-{digest}"

    def __len__(self) -> int:
        return len(self._split)

    def take(self, index: Indices, epoch: Indices) -> Batch:
        index = self.original(index)
        if self._batched:
            whole = _pick(self._samples.dataset[torch.from_numpy(index)], self._samples.keys, "data.dataset: a batch")
            inputs, targets = _converted(whole, "data.dataset:")
            check_entries(inputs, "data.dataset:", place=1)
        elif self._workers:
            return self._processes.ask(index, epoch, self._joined)()
        else:
            inputs, targets = self._samples.batch(index, epoch)
        return self._batch(inputs, targets)

    def ask(self, index: Indices, epoch: Indices) -> Callable[[], Batch] | None:
        """Have a batch read by the processes; None if there are none."""
        if not self._workers or self._batched:
            return None
        return self._processes.ask(self.original(index), epoch, self._joined)

    def _joined(self, parts: Sequence[Any]) -> Batch:
        """A batch of what several processes have read."""
        columns = zip(*parts, strict=True)
        inputs, targets = (
            tree(torch.from_numpy, joined(column, fill))
            for column, fill in zip(columns, (self._samples.pad, IGNORE), strict=True)
        )
        return self._batch(inputs, targets)

    def _batch(self, inputs: Any, targets: Any) -> Batch:
        batch = {"inputs": inputs, "targets": targets}
        return batch | {"targets": next_targets(batch)} if self._shift else batch

    def original(self, index: Indices) -> Indices:
        """Indices of these samples in the user's dataset."""
        return self._split.original(index) if self._kept is None else index

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        return self._split.order(positions, seed=seed)

    def holdout(self) -> "Dataset | None":
        """The same object each time, because `resplit` changes it."""
        return self._heldout

    @cached_property
    def _heldout(self) -> "Dataset | None":
        rest = self._split.rest()
        if self._kept is None and rest is None:
            return None
        samples, (inputs, targets) = self._samples, self._samples.keys
        build = partial(
            Dataset, holdout=0, inputs=inputs, targets=targets, shift=self._shift, outputs=self._outputs,
            pad=samples.pad, length=samples.length, collate=samples.collate, transform=samples.transform,
            workers=self._workers, columns=self._columns, held=True,
        )  # fmt: skip
        if self._kept is not None:
            return build(self._kept, split=Scattered.of(_length(self._kept), 0))
        return build(samples.dataset, split=rest, where=samples.where)

    def resplit(self, split: Split) -> None:
        """Train on, and hold out, other samples of the same dataset."""
        rest, self._split = split.rest(), split
        if self._heldout is not None and rest is not None:
            self._heldout.resplit(rest)

    @cached_property
    def _processes(self) -> Workers:
        return Workers(self._samples.batch, self._workers)


def _check_call(transform: Transform) -> None:
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


def _names(inputs: Inputs) -> Sequence[str]:
    return [] if isinstance(inputs, int | str) else inputs


def _pick(sample: Any, keys: Keys, name: str, *, optional: str | None = None) -> tuple[Any, Any]:
    """(input, target) of a sample, or of a batch. Raises WordsError, with its `name`, for a missing key, unless it is
    `optional`, and for a sample that is one array or row: its entries are no parts.
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
        return {key: named[key] for key in inputs if key != optional or key in named}, named[target]
    except (KeyError, IndexError, TypeError):
        has = f"{len(sample)} parts" if isinstance(sample, Sequence) else type(sample).__name__
        if isinstance(sample, Mapping):
            has = ", ".join(map(str, sample))
        raise WordsError(
            f"{name} has {has}. data.inputs={keys[0]} and data.targets={keys[1]} must name two of these."
        ) from None


def _is_row(sample: list[Any]) -> bool:
    """Whether it is a row, such as of tokens: more than a pair of numbers."""
    return len(sample) > 2 and isinstance(sample[0], Number)


def _converted(pair: tuple[Any, Any], where: str) -> tuple[Any, Any]:
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


def _length(dataset: Any) -> int:
    """The number of samples. Raises WordsError."""
    try:
        return len(dataset)
    except Exception as error:
        raise WordsError(
            f"data.dataset: __len__ of {type(dataset).__name__} fails ({type(error).__name__}: {first_line(error)}). "
            "It must return the number of samples, an integer >= 1."
        ) from error


def _has_getitem(dataset: Any) -> bool:
    """Whether it overrides `__getitem__` of torch's Dataset, which raises."""
    abstract = torch.utils.data.Dataset.__getitem__
    return getattr(type(dataset), "__getitem__", abstract) is not abstract


def _remedy(dataset: Any) -> str:
    if hasattr(dataset, "__getitems__"):
        return "Samples are read one by one: add def __getitem__(self, i): return self.__getitems__([i])[0]."
    if type(dataset).__module__.startswith("ray.data."):
        return "Type data=ray data.dataset._target_=<a function of yours that returns it>."
    if isinstance(dataset, DataLoader):
        return "Give the dataset it reads from; set batches, order and processes with batch=, seed= and data.workers=."
    return (
        "A stream cannot be resumed in its middle on another mesh: give its items an index, or write them to files "
        "for data=text or data=tokens."
    )


def _classes(dataset: Any) -> int | None:
    """The number of classes, if the dataset has `classes` (names or number), `targets`, or is a TensorDataset of
    integers.
    """
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, int | np.integer):
        return int(classes)
    if isinstance(classes, Sized) and len(classes):
        return len(classes)
    targets = getattr(dataset, "targets", None)
    if targets is None and isinstance(dataset, TensorDataset):
        targets = dataset.tensors[-1]
    try:
        labels = torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError):  # no labels, or labels that are not numbers
        return None
    integers = not (labels.is_floating_point() or labels.is_complex()) and labels.numel()
    return int(labels.max()) + 1 if integers else None
