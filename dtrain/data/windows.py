"""Samples cut from memory-mapped token arrays: window w of an array is tokens [w*T, w*T + T], inputs and next
tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dtrain.data import Batch, Indices, Loading
from dtrain.data.order import _mix64
from dtrain.errors import PreflightError


@dataclass(frozen=True)
class Windows:
    """A Source over token arrays of any unsigned type. Every pass cuts at another offset, so windows do not repeat.
    Raises PreflightError if there is not one full window.
    """

    arrays: Sequence[NDArray[Any]]
    sequence: int
    vocab: int
    fingerprint: str
    kept: Sequence[NDArray[Any]] = ()
    """Held-out arrays."""
    shifting: bool = True
    dense: bool = True
    loading: Loading = "thread"

    def __post_init__(self) -> None:
        if len(self) < 1:
            tokens = sum(len(array) for array in self.arrays)
            raise PreflightError(
                f"data: {tokens} tokens are too few for one sample of data.sequence={self.sequence}. Type a smaller "
                "data.sequence."
            )

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"vocab": self.vocab}

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def counts(self) -> NDArray[np.int64]:
        """The windows of each array."""
        spare = self.sequence if self.shifting else 1
        return np.array([max(0, (len(array) - spare) // self.sequence) for array in self.arrays], np.int64)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.counts)

    def take(self, index: Indices, epoch: Indices) -> Batch:
        """`inputs` and `targets`, both [B, T] int64."""
        ends = self._ends
        owner = np.searchsorted(ends, index, side="right")
        starts = (index - np.where(owner > 0, ends[owner - 1], 0)) * self.sequence
        if self.shifting:
            passes, inverse = np.unique(epoch, return_inverse=True)
            starts = starts + np.array([_mix64(int(e)) % self.sequence if e else 0 for e in passes])[inverse]
        rows = np.empty((len(index), self.sequence + 1), dtype=np.int64)
        span = np.arange(self.sequence + 1)
        for which in np.unique(owner):
            here = owner == which
            rows[here] = self.arrays[which][starts[here, None] + span]
        return next_tokens(rows)

    def holdout(self) -> "Windows | None":
        if sum(max(0, (len(array) - 1) // self.sequence) for array in self.kept) < 1:
            return None
        return replace(self, arrays=self.kept, kept=(), shifting=False)

    def whole(self) -> "Windows":
        """The same windows and the last, for one pass."""
        return replace(self, shifting=False)


def next_tokens(rows: NDArray[np.int64]) -> Batch:
    """`inputs` and `targets` [B, T] of rows [B, T + 1]."""
    return {"inputs": torch.from_numpy(rows[:, :-1].copy()), "targets": torch.from_numpy(rows[:, 1:].copy())}


class Corpus(ABC):
    """A Source of windows that are opened when they are first needed."""

    dense = True
    loading: Loading = "thread"

    _vocab: int

    @property
    @abstractmethod
    def _windows(self) -> Windows: ...

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"vocab": self._vocab}

    @property
    def fingerprint(self) -> str:
        return self._windows.fingerprint

    def __len__(self) -> int:
        return len(self._windows)

    def take(self, index: Indices, epoch: Indices) -> Batch:
        return self._windows.take(index, epoch)

    def holdout(self) -> Windows | None:
        return self._windows.holdout()

    def whole(self) -> Windows:
        """The same windows and the last, for one pass."""
        return self._windows.whole()


def split(arrays: Sequence[NDArray[Any]], part: float) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Split off the last fraction `part` of all tokens: (the arrays before, the arrays of that part)."""
    keep = round(sum(len(array) for array in arrays) * part)
    train, kept = list(arrays), list[NDArray[Any]]()
    while keep > 0 and train:
        last = train.pop()
        if len(last) > keep:
            train.append(last[:-keep])
            last = last[-keep:]
        kept.insert(0, last)
        keep -= len(last)
    return train, kept
