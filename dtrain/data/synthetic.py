"""Random samples with a rule to learn: sample i is a function of (seed, i), so nothing is stored."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dtrain.data import Batch, Indices, Loading
from dtrain.data.order import _mix32, _mix64
from dtrain.data.windows import next_tokens

PERIOD = 7
"""next_token repeats a random phrase of this many tokens, so that later tokens can be copied from earlier ones."""
INPUT_BITS = 21
"""Binary digits after the point of an input, in the product that gives its targets."""


@dataclass(frozen=True)
class Synthetic:
    """A Source of random samples. Inputs are uniform in [-1, 1); targets are a fixed linear map of them, or the index
    of its largest value for classification.
    """

    task: str
    inputs: Sequence[int]
    outputs: int
    vocab: int
    sequence: int
    samples: int
    holdout_part: float = 0.0
    seed: int = 0
    first: int = 0
    dense: bool = True
    loading: Loading = "thread"

    @property
    def facts(self) -> Mapping[str, Any]:
        if self.task == "next_token":
            return {"vocab": self.vocab}
        return {"inputs": list(self.inputs), "outputs": self.outputs}

    @property
    def fingerprint(self) -> str:
        sizes = (self.outputs, self.vocab, self.sequence, self.samples, self.first, self.seed)
        return f"synthetic-2-{self.task}-{list(self.inputs)}-{'-'.join(map(str, sizes))}"

    def __len__(self) -> int:
        return self.samples

    def take(self, index: Indices, epoch: Indices) -> Batch:
        index = index + self.first
        if self.task == "next_token":
            phrase = (self._random(index, PERIOD) * self.vocab).astype(np.int64)
            return next_tokens(phrase[:, np.arange(self.sequence + 1) % PERIOD])
        x = (self._random(index, math.prod(self.inputs)) * 2 - 1).astype(np.float32)
        y = self._mapped(x)
        targets = torch.from_numpy(y.argmax(1) if self.task == "classification" else y)
        return {"inputs": torch.from_numpy(x).view(-1, *self.inputs), "targets": targets}

    def holdout(self) -> "Synthetic | None":
        kept = int(self.samples * self.holdout_part)
        return replace(self, first=self.samples, samples=kept, holdout_part=0.0) if kept else None

    def _random(self, index: Indices, columns: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """[len(index), columns] in [0, 1)."""
        counters = index.astype(np.uint64)[:, None] * np.uint64(columns) + np.arange(columns, dtype=np.uint64)
        mixed = _mix32(_mix32(counters) ^ np.uint64(_mix64(self.seed) & 0xFFFFFFFF))
        uniform: np.ndarray[Any, np.dtype[np.float64]] = mixed.astype(np.float64) / 2**32
        return uniform

    def _mapped(self, x: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The linear map of every row, exactly: whole numbers below 2**53 are not rounded, in whatever order a CPU's
        BLAS adds them up.

        Of rounded products a row would depend on the rows it is computed with, and on the CPU.
        """
        weights, unit = self._weights
        exact: np.ndarray[Any, np.dtype[np.float64]] = np.rint(x.astype(np.float64) * 2**INPUT_BITS) @ weights
        return (exact * unit).astype(np.float32)

    @cached_property
    def _weights(self) -> tuple[np.ndarray[Any, np.dtype[np.float64]], float]:
        """Normal numbers as integers, and the factor that gives the map a standard deviation of size**-0.5."""
        size = math.prod(self.inputs)
        # products are below 2**(INPUT_BITS + 3 + bits) up to 8 standard deviations; size of them below 2**53
        bits = 29 - size.bit_length()
        normal = np.random.default_rng(self.seed).normal(size=(size, self.outputs))
        return np.rint(normal * 2.0**bits), 2.0 ** -(INPUT_BITS + bits) / math.sqrt(size)
