"""Any map-style dataset as a Source: `__len__`, `__getitem__`, nothing to inherit.

Augmentation is reproducible: the generators of Python, numpy and torch are seeded from (i, e) before sample i of pass e
is read, and a `transform(sample, generator)` is given one of its own.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dtrain.data import IGNORE, Batch, Indices, Loading
from dtrain.data.collate import (
    TARGETS,
    Sizes,
    as_fractions,
    batch_of,
    check_entries,
    check_range,
    fractions_of,
    joined,
    rounded,
    tree,
)  # fmt: skip
from dtrain.data.samples import Inputs, Samples, Transform, check_call, converted, names, pick
from dtrain.data.split import Scattered, Split
from dtrain.data.workers import Workers
from dtrain.errors import WordsError, an, first_line
from dtrain.files import sampled
from dtrain.files.rowfile import MASKS
from dtrain.storage import mapped

MOST_CLASSES = 1 << 24
"""Classes that are read off targets; more are no classes."""


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
        masks: Sequence[str] = (),
        near: int | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset | str) or not (hasattr(dataset, "__len__") and _has_getitem(dataset)):
            raise WordsError(
                f"data.dataset: {type(dataset).__name__} is not map-style: it needs __len__ and __getitem__. "
                f"{_remedy(dataset)}"
            )
        arrays = vars(dataset).values() if hasattr(dataset, "__dict__") else ()
        files = [Path(each.filename) for each in arrays if isinstance(each, np.memmap) and each.filename]
        sampled.note({} if held else {str(mapped.note(file)): file for file in files})
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
        _check_functions(collate, transform)
        keys = (0 if inputs is None else inputs, 1 if targets is None else targets)
        named = [*dict.fromkeys(name for name in (*masks, *names(keys[0])) if name in MASKS and pad is not None)]
        self._samples = Samples(
            dataset, keys, pad, length, collate, transform=transform, held=held, where=where, masks=named, near=near
        )
        self._beside: str | None = None
        self._fractions = frozenset[str]()
        self._keys_named = inputs is not None or targets is not None
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
        self._check_parts()
        batch = self.take(np.array([0]), np.array([0]))
        inputs, facts = batch["inputs"], dict[str, Any]()
        if isinstance(inputs, Tensor):
            facts = {"inputs": list(inputs.shape[1:]), "kind": str(inputs.dtype).removeprefix("torch.")}
        classes, targets = _classes(self._samples.dataset), batch["targets"]
        width = targets[0].numel() if isinstance(targets, Tensor) else None
        if self._outputs and classes and 1 < self._outputs < classes and self._outputs != width:
            raise WordsError(
                f"data.outputs={self._outputs}: the dataset has {classes} classes. Type data.outputs={classes}, or "
                "leave it out."
            )
        if not self._outputs and classes and classes > MOST_CLASSES:
            return {**facts, "unknown": too_many(f"the largest target is {classes - 1}", classes)}
        outputs = self._outputs or classes
        if outputs is None and isinstance(targets, Tensor) and targets.is_floating_point():
            outputs = width
        facts |= {"outputs": outputs, "vocab": outputs} if outputs else {}
        return facts | ({"class_names": self.class_names} if self.class_names else {})

    def _check_parts(self) -> None:
        """Raises WordsError if samples are tuples of which a part would be left out."""
        samples = self._samples
        is_own = self._keys_named or self._columns or samples.collate or samples.transform
        first = None if is_own else samples.dataset[0]
        if isinstance(first, tuple) and len(first) > 2:
            raise WordsError(
                f"data.dataset: a sample of {type(samples.dataset).__name__} has {len(first)} parts, and without "
                "words for them the first is the input and the second the target. Type data.inputs=[0,1] "
                "data.targets=2, or data.inputs=0 data.targets=1 to leave out the others."
            )

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes, if the user's dataset has them."""
        classes: Any = getattr(self._samples.dataset, "classes", None)
        is_list = isinstance(classes, list | tuple) and all(isinstance(name, str) for name in classes)
        return list(classes) if is_list else None

    @property
    def notes(self) -> list[str]:
        """A sentence about whole numbers that are rounded, as far as the first and last sample tell."""
        ends = [] if self._samples.collate else self._ends
        for index, (inputs, _) in zip((0, self._whole - 1), ends, strict=False):
            if (number := rounded(inputs)) is not None:
                near = f"{number:.0f}, which fp32 rounds to {np.float32(number):.0f}"
                return [
                    f"data: {self._samples.where(index)} has {near}. If it is an id, return it as an input of its own, "
                    "a whole number"
                ]
        return []

    @property
    def _both_ends(self) -> list[Any]:
        return [self._samples.one(index, 0) for index in (0, self._whole - 1)]

    @cached_property
    def _ends(self) -> list[Any]:
        """The first and the last sample, as they were read first."""
        return self._both_ends

    @cached_property
    def fingerprint(self) -> str:
        first, again = repr(self._ends), repr(self._both_ends)
        # samples that use a random generator of their own differ each time they are read
        digest = hashlib.sha256(first.encode()).hexdigest()[:16] if first == again else "random"
        return f"{type(self._samples.dataset).__name__}-{self._whole}-{digest}"

    def __len__(self) -> int:
        return len(self._split)

    def take(self, index: Indices, epoch: Indices) -> Batch:
        return self.sized(index, epoch)[0]

    def sized(self, index: Indices, epoch: Indices) -> tuple[Batch, Sizes]:
        """A batch, and the lengths of its rows where they were padded."""
        inputs, targets, sizes = self._read(self.original(index), epoch)
        return self._batch(inputs, targets, sizes), sizes

    def _read(self, index: Indices, epoch: Indices) -> tuple[Any, Any, Sizes]:
        """(inputs, targets, sizes) of samples of the user's dataset."""
        if self._batched:
            whole = pick(self._samples.dataset[torch.from_numpy(index)], self._samples.keys, "data.dataset: a batch")
            inputs, targets = converted(whole, "data.dataset:")
            check_entries(inputs, "data.dataset:", place=1)
            check_range(
                (inputs, targets), lambda: zip(("data.dataset: an input", "data.dataset: a target"), whole, strict=True)
            )
            return inputs, targets, {}
        if self._workers:
            return self._processes.ask(index, epoch, self._joined)()
        return self._samples.batch(index, epoch)

    def ask(self, index: Indices, epoch: Indices) -> Callable[[], Batch] | None:
        """Have a batch read by the processes; None if there are none."""
        if not self._workers or self._batched:
            return None
        return self._processes.ask(self.original(index), epoch, lambda parts: self._batch(*self._joined(parts)))

    def whole(self) -> "Dataset":
        self._samples = replace(self._samples, held=True)
        return self

    def with_mask(self, name: str) -> None:
        """Give an attention_mask of padded rows from now on, and `name` to an input that has none."""
        self._beside = name if self._samples.pad is not None else None
        if self._heldout is not None:
            self._heldout.with_mask(name)

    def fractions(self) -> frozenset[str]:
        return fractions_of(self._read(self.original(np.array([0])), np.array([0]))[0])

    def with_fractions(self, names: frozenset[str]) -> None:
        self._fractions = names
        if self._heldout is not None:
            self._heldout.with_fractions(names)

    def _joined(self, parts: Sequence[Any]) -> tuple[Any, Any, Sizes]:
        """(inputs, targets, sizes) of what several processes have read."""
        inputs, targets, sizes = (
            tree(torch.from_numpy, joined(column, fill))
            for column, fill in zip(zip(*parts, strict=True), (self._samples.pad, IGNORE, None), strict=True)
        )
        longest = {part[1].shape[1:2] for part in parts if isinstance(part[1], np.ndarray)}
        if not sizes and len(longest) > 1:  # of a collate function, which padded each part to a length of its own
            sizes = {TARGETS: torch.tensor([part[1].shape[1] for part in parts for _ in part[1]])}
        return inputs, targets, sizes

    def _batch(self, inputs: Any, targets: Any, sizes: Sizes) -> Batch:
        if self._fractions:
            inputs = as_fractions(inputs, self._fractions)
        return batch_of(inputs, targets, sizes, shift=self._shift, beside=self._beside)

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
            workers=self._workers, columns=self._columns, held=True, masks=samples.masks, near=samples.near,
        )  # fmt: skip
        if self._kept is not None:
            held = build(self._kept, split=Scattered.of(_length(self._kept), 0))
            held.with_fractions(self.fractions())
            return held
        return build(samples.dataset, split=rest, where=samples.where)

    def resplit(self, split: Split) -> None:
        """Train on, and hold out, other samples of the same dataset."""
        rest, self._split = split.rest(), split
        if self._heldout is not None and rest is not None:
            self._heldout.resplit(rest)

    @cached_property
    def _processes(self) -> Workers:
        return Workers(self._samples.batch, self._workers)


def too_many(what: str, classes: int) -> str:
    """Why so many classes are not taken."""
    return (
        f"{what}, so there would be {classes} classes. Number them from 0 on, type data.outputs=<their number>, or "
        "objective=regression if it is a quantity."
    )


def _check_functions(collate: Any, transform: Any) -> None:
    """Raises WordsError for what cannot be called, or not so."""
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
        check_call(transform)


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
        "A stream cannot be resumed in its middle on another mesh: give its items an index, write them to files, or "
        "type data=stream data.stream._target_=<a function that returns it>."
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
