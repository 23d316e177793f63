"""Any map-style dataset as a Source: `__len__`, `__getitem__`, nothing to inherit.

Augmentation is reproducible: the generators of Python, numpy and torch are seeded from (i, e) before sample i of pass e
is read.
"""

import hashlib
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dtrain.data import IGNORE, Batch, Indices, Loading
from dtrain.data.collate import MASK, joined, stack, tensor, tree
from dtrain.data.order import _mix64, permute
from dtrain.data.shift import next_targets
from dtrain.errors import WordsError
from dtrain.lifecycle import loaders
from dtrain.lifecycle.signals import STOP_SIGNALS

Inputs = int | str | Sequence[str]
Keys = tuple[Inputs, int | str]


@dataclass(frozen=True)
class Samples:
    """Reads samples of `dataset` by index, and makes batches of them."""

    dataset: Any
    keys: Keys
    pad: float | None = None
    length: int | None = None
    collate: Callable[[list[Any]], Any] | None = None

    def one(self, index: int, epoch: int) -> Any:
        """A sample of the user's dataset: the keys that are used, or all of it for the user's collate function."""
        _note(index)
        _seed(index, epoch)
        try:
            sample = self.dataset[index]
        except IndexError as error:
            size = len(self.dataset)
            raise IndexError(
                f"data.dataset: {type(self.dataset).__name__} has no sample {index}, but its __len__ is {size}, so it "
                f"must have samples 0 to {size - 1} ({error})"
            ) from error
        return sample if self.collate else _pick(sample, self.keys, optional=MASK if self.pad is not None else None)

    def batch(self, index: Indices, epoch: Indices) -> tuple[Any, Any]:
        """(inputs, targets), tensors or mappings of tensors."""
        samples = [self.one(int(i), int(e)) for i, e in zip(index, epoch, strict=True)]
        if self.collate:
            inputs, targets = _pick(self.collate(samples), self.keys)
            return tree(tensor, inputs), tree(tensor, targets)
        return stack(
            samples, pad=self.pad, length=self.length, masked=self.pad is not None and MASK in _names(self.keys[0])
        )


_samples: Samples | None = None
"""The samples that this loading process reads."""
_note: Callable[[int], None] = lambda index: None  # noqa: E731
"""Records which sample is being read, for the rank to report if this process dies."""


class Dataset:
    """A Source of a map-style dataset. `inputs` and `targets` are the keys of a sample, in a tuple or a mapping;
    several inputs stay a mapping. `workers` processes read samples; 0 means this process.

    Rows of different lengths are padded with `pad`, to the longest of a batch or to `length`; or `collate` makes a
    batch of a list of samples. `holdout` is a fraction; at least one sample is held out and one is not. Raises
    WordsError if the object is not map-style or a sample lacks a key.
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
        workers: int = 0,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset | str) or not (hasattr(dataset, "__len__") and _has_getitem(dataset)):
            raise WordsError(
                f"data.dataset: {type(dataset).__name__} is not map-style: it needs __len__ and __getitem__. "
                f"{_remedy(dataset)}"
            )
        if len(dataset) < 1:
            raise WordsError(f"data.dataset: {type(dataset).__name__} has no samples.")
        about = getattr(type(dataset), "about", None)
        stated = about.get("samples") if isinstance(about, dict) and stop is None else None
        if stated not in (None, len(dataset)):
            raise WordsError(
                f"data.dataset: {type(dataset).__name__} states samples = {stated} in its about, but its __len__ is "
                f"{len(dataset)}. Make them equal, or leave out samples in about."
            )
        if workers < 0:
            raise WordsError(f"data.workers={workers} must be >= 0. Type data.workers=0 for no extra processes.")
        if collate is not None and not callable(collate):
            raise WordsError(
                f"data.collate: a {type(collate).__name__} cannot be called with a list of samples. Name a function, "
                "or a class with __call__."
            )
        self._samples = Samples(
            dataset, (0 if inputs is None else inputs, 1 if targets is None else targets), pad, length, collate
        )
        self._kept, self._outputs, self._workers = holdout_dataset, outputs, workers
        self._whole, self._shift = len(dataset), shift
        split = holdout > 0 and holdout_dataset is None
        heldout = min(max(1, round(self._whole * holdout)), self._whole - 1) if split else 0
        self._start, self._stop = start, self._whole - heldout if stop is None else stop
        self._batched = isinstance(dataset, TensorDataset) and collate is None
        self.loading: Loading = "thread" if workers else "step"
        if self._batched:
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
        return facts | ({"outputs": outputs, "vocab": outputs} if outputs else {})

    @cached_property
    def fingerprint(self) -> str:
        first, again = (repr([self._samples.one(index, 0) for index in (0, self._whole - 1)]) for _ in range(2))
        # samples that use a random generator of their own differ each time they are read
        digest = hashlib.sha256(first.encode()).hexdigest()[:16] if first == again else "random"
        return f"{type(self._samples.dataset).__name__}-{self._whole}-{digest}"

    def __len__(self) -> int:
        return self._stop - self._start

    def take(self, index: Indices, epoch: Indices) -> Batch:
        index = self.original(index)
        if self._batched:
            inputs, targets = _pick(self._samples.dataset[torch.from_numpy(index)], self._samples.keys)
            inputs, targets = tree(tensor, inputs), tree(tensor, targets)
        elif self._workers:
            columns = zip(*(part for part in self._read_by_workers(index, epoch) if part is not None), strict=True)
            inputs, targets = (
                tree(torch.from_numpy, joined(column, fill))
                for column, fill in zip(columns, (self._samples.pad, IGNORE), strict=True)
            )
        else:
            inputs, targets = self._samples.batch(index, epoch)
        batch = {"inputs": inputs, "targets": targets}
        return batch | {"targets": next_targets(batch)} if self._shift else batch

    def original(self, index: Indices) -> Indices:
        """Indices of these samples in the user's dataset."""
        # the held-out part is chosen by a fixed permutation, because datasets tend to be sorted by class
        return permute(index + self._start, n=self._whole, key=1) if self._kept is None else index

    def holdout(self) -> "Dataset | None":
        if self._kept is None and self._stop == self._whole:
            return None
        samples, (inputs, targets) = self._samples, self._samples.keys
        build = partial(
            Dataset, holdout=0, inputs=inputs, targets=targets, shift=self._shift, outputs=self._outputs,
            pad=samples.pad, length=samples.length, collate=samples.collate, workers=self._workers,
        )  # fmt: skip
        if self._kept is not None:
            return build(self._kept, stop=len(self._kept))
        return build(samples.dataset, start=self._stop, stop=self._whole)

    def _read_by_workers(self, index: Indices, epoch: Indices) -> list[Any]:
        """Read in the loading processes. Raises RuntimeError, with the sample and the signal, if one of them died."""
        pool = self._pool
        processes = pool._processes  # private; taken now, because the pool clears it when a process dies
        try:
            return list(pool.map(_read, np.array_split(index, self._workers), np.array_split(epoch, self._workers)))
        except BrokenProcessPool as error:
            reading = loaders.reading()
            deaths = [
                f"a loading process {_ending(code)} while it read sample {reading.get(pid, '?')} of data.dataset"
                for pid, code in _dead(list(dict(processes or {}).values())).items()
            ]
            raise RuntimeError("; ".join(deaths) or "a loading process died") from error

    @cached_property
    def _reading(self) -> Any:
        return loaders.table(self._workers)

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        # fresh interpreters: this process has threads, whose locks a fork would copy
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(
            self._workers, context, initializer=_adopt, initargs=(self._samples, self._reading, context.Value("i", 0))
        )


def _dead(processes: Sequence[Any]) -> dict[int, int]:
    """pid -> exit code of the processes that ended by themselves; empty if no exit code is known within a second."""
    deadline = time.monotonic() + 1.0
    while True:
        # the pool terminates the others; it waits for them in a thread of its own, which may see an exit code before
        # this thread does
        codes = {process.pid: process.exitcode for process in processes}
        dead = {pid: code for pid, code in codes.items() if code not in (None, 0, -signal.SIGTERM)}
        if dead or time.monotonic() > deadline:
            return dead
        time.sleep(0.01)


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with exit code {code}"


def _adopt(samples: Samples, reading: Any, count: Any) -> None:
    """Set up a loading process. It ignores stop signals, because the rank needs samples until it stops; it dies with
    the rank.
    """
    global _samples, _note
    _note = loaders.answer(reading, count)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    torch.set_num_threads(1)
    _samples = samples


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _read(index: Indices, epoch: Indices) -> Any:
    """The samples as nested numpy arrays, because the receiving thread must not use torch."""
    assert _samples
    try:
        return tuple(tree(Tensor.numpy, part) for part in _samples.batch(index, epoch)) if len(index) else None
    except Exception as error:
        if _can_pickle(error):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from error.__cause__


def _can_pickle(error: Exception) -> bool:
    """Whether an error can be pickled; if not, the rank would only learn that a process has ended."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _names(inputs: Inputs) -> Sequence[str]:
    return [] if isinstance(inputs, int | str) else inputs


def _pick(sample: Any, keys: Keys, *, optional: str | None = None) -> tuple[Any, Any]:
    """(input, target) of a sample, or of a batch. Raises WordsError for a missing key, unless it is `optional`."""
    inputs, target = keys
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
            f"data.inputs={keys[0]} data.targets={keys[1]}: a sample has {has}. Name the two keys."
        ) from None


def _seed(index: int, epoch: int) -> None:
    value = _mix64(_mix64(index) ^ epoch)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value >> 1)


def _has_getitem(dataset: Any) -> bool:
    """Whether it overrides `__getitem__` of torch's Dataset, which raises."""
    abstract = torch.utils.data.Dataset.__getitem__
    return getattr(type(dataset), "__getitem__", abstract) is not abstract


def _remedy(dataset: Any) -> str:
    if hasattr(dataset, "__getitems__"):
        return "Samples are read one by one: add def __getitem__(self, i): return self.__getitems__([i])[0]."
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
