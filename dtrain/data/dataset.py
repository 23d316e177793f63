"""Any map-style dataset as a Source: `__len__`, `__getitem__`, nothing to inherit.

Augmentation is reproducible: before sample i of pass e is read, Python's, numpy's and torch's generators are seeded from (i, e).
"""

import hashlib
import multiprocessing
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from dtrain.data import Batch, Indices, Loading
from dtrain.data.order import _mix64, permute
from dtrain.errors import WordsError
from dtrain.signals import WISHES

Inputs = int | str | Sequence[str]
Keys = tuple[Inputs, int | str]
_dataset: Any = None
_keys: Keys = (0, 1)
"""In a loading process: the dataset it reads from, and the keys of a sample."""


class Dataset:
    """`inputs` and `targets` are the keys of a sample, in a tuple or a mapping; several inputs stay a mapping; `workers` processes read samples, 0 means this one.

    64-bit floats become 32-bit ones. Raises WordsError when the object is not map-style or a sample lacks a key.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        holdout: float = 0.1,
        holdout_dataset: Any = None,
        inputs: Inputs | None = None,
        targets: int | str | None = None,
        outputs: int | None = None,
        workers: int = 0,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset | str) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise WordsError(f"data.dataset: {type(dataset).__name__} is not map-style: __len__ and __getitem__ are needed. {_instead(dataset)}")
        if len(dataset) < 1:
            raise WordsError(f"data.dataset: {type(dataset).__name__} has no samples.")
        if workers < 0:
            raise WordsError(f"data.workers={workers}: a number of processes, 0 for none. Type data.workers=0.")
        keys: Keys = (0 if inputs is None else inputs, 1 if targets is None else targets)
        self._dataset, self._kept, self._keys, self._outputs, self._workers = dataset, holdout_dataset, keys, outputs, workers
        self._whole = len(dataset)
        held = 0 if holdout_dataset is not None else round(self._whole * holdout)
        self._start, self._stop = start, self._whole - held if stop is None else stop
        self._batched = isinstance(dataset, TensorDataset)
        self.loading: Loading = "block" if self._batched else "thread" if workers else "step"
        self.dense = False

    @property
    def facts(self) -> Mapping[str, Any]:
        batch = self.take(np.array([0]), np.array([0]))
        facts: dict[str, Any] = {"inputs": list(batch["inputs"].shape[1:])} if isinstance(batch["inputs"], Tensor) else {}
        outputs = self._outputs or _classes(self._dataset)
        if outputs is None and batch["targets"].is_floating_point():
            outputs = batch["targets"][0].numel()
        return facts | ({"outputs": outputs, "vocab": outputs} if outputs else {})

    @cached_property
    def fingerprint(self) -> str:
        first, again = (repr([self._sample(index, 0) for index in (0, self._whole - 1)]) for _ in range(2))
        # samples that draw from a generator of their own are other ones every time they are read
        told = hashlib.sha256(first.encode()).hexdigest()[:16] if first == again else "random"
        return f"{type(self._dataset).__name__}-{self._whole}-{told}"

    def __len__(self) -> int:
        return self._stop - self._start

    def take(self, index: Indices, epoch: Indices) -> Batch:
        index = self.original(index)
        if self._batched:
            inputs, targets = _pick(self._dataset[torch.from_numpy(index)], self._keys)
        elif self._workers:
            parts = self._pool.map(_read, np.array_split(index, self._workers), np.array_split(epoch, self._workers))
            inputs, targets = _tree(lambda *arrays: torch.from_numpy(np.concatenate(arrays)), *(part for part in parts if part is not None))
        else:
            inputs, targets = default_collate([self._sample(int(i), int(e)) for i, e in zip(index, epoch, strict=True)])
        return {"inputs": _single(inputs), "targets": _single(targets)}

    def original(self, index: Indices) -> Indices:
        """Where these samples stand in the user's dataset."""
        # the split is a fixed permutation, because datasets tend to be sorted by class
        return permute(index + self._start, n=self._whole, key=1) if self._kept is None else index

    def holdout(self) -> "Dataset | None":
        inputs, targets = self._keys
        if self._kept is not None:
            return Dataset(self._kept, holdout=0, inputs=inputs, targets=targets, outputs=self._outputs, workers=self._workers)
        if self._stop == self._whole:
            return None
        return Dataset(
            self._dataset, inputs=inputs, targets=targets, outputs=self._outputs, workers=self._workers, start=self._stop, stop=self._whole
        )

    def _sample(self, index: int, epoch: int) -> Any:
        _seed(index, epoch)
        return _pick(self._dataset[index], self._keys)

    @cached_property
    def _pool(self) -> ProcessPoolExecutor:
        # a fresh interpreter each: this process has threads, and a fork would copy their locks
        return ProcessPoolExecutor(self._workers, multiprocessing.get_context("spawn"), initializer=_adopt, initargs=(self._dataset, self._keys))


def _adopt(dataset: Any, keys: Keys) -> None:
    """A loading process begins. Signals are for the rank, which still needs samples until it stops; and it does not outlive the rank."""
    global _dataset, _keys
    for number in WISHES:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    torch.set_num_threads(1)
    _dataset, _keys = dataset, keys


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _read(index: Indices, epoch: Indices) -> Any:
    """The samples as one tree of numpy arrays: what a loading process sends, and what the thread that waits for it may touch."""
    samples = []
    try:
        for i, e in zip(index.tolist(), epoch.tolist(), strict=True):
            _seed(i, e)
            samples.append(_pick(_dataset[i], _keys))
        return _tree(Tensor.numpy, default_collate(samples)) if samples else None
    except Exception as error:
        if _travels(error):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__) from error.__cause__


def _travels(error: Exception) -> bool:
    """Whether an error survives pickle; of one that does not the rank would hear only that a process has ended."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


def _pick(sample: Any, keys: Keys) -> tuple[Any, Any]:
    """(input, target) of a sample, or of a batch of them. Raises WordsError when a key is not there."""
    try:
        inputs, target = keys
        return sample[inputs] if isinstance(inputs, int | str) else {key: sample[key] for key in inputs}, sample[target]
    except (KeyError, IndexError, TypeError):
        has = (
            ", ".join(map(str, sample))
            if isinstance(sample, Mapping)
            else f"{len(sample)} parts"
            if isinstance(sample, Sequence)
            else type(sample).__name__
        )
        raise WordsError(f"data.inputs={keys[0]} data.targets={keys[1]}: a sample has {has}. Name the two keys.") from None


def _tree(change: Callable[..., Any], first: Any, *others: Any) -> Any:
    """`change` of the leaves of trees of one shape: mappings, lists and tuples."""
    if isinstance(first, Mapping):
        return {key: _tree(change, item, *(other[key] for other in others)) for key, item in first.items()}
    if isinstance(first, list | tuple):
        return [_tree(change, *items) for items in zip(first, *others, strict=True)]
    return change(first, *others)


def _seed(index: int, epoch: int) -> None:
    value = _mix64(_mix64(index) ^ epoch)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value >> 1)


def _instead(dataset: Any) -> str:
    if isinstance(dataset, DataLoader):
        return "Give the dataset it reads from: batches, order and processes are the words batch, seed and data.workers."
    return "A stream cannot be gone on with from its middle on another mesh: give its items an index, or write them to files for data=text or data=tokens."


def _single(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype == torch.float64 else value
    if not isinstance(value, Mapping):
        raise WordsError(f"data.dataset: an input or target is a {type(value).__name__}. Give several parts names: return them as a mapping.")
    return {key: _single(item) for key, item in value.items()}


def _classes(dataset: Any) -> int | None:
    """The number of classes, where the dataset says: `classes`, `targets`, or a TensorDataset of whole numbers."""
    if hasattr(dataset, "classes"):
        return len(dataset.classes)
    targets = getattr(dataset, "targets", None)
    if targets is None and isinstance(dataset, TensorDataset):
        targets = dataset.tensors[-1]
    if targets is None:
        return None
    labels = torch.as_tensor(targets)
    return None if labels.is_floating_point() else int(labels.max()) + 1
