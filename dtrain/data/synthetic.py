"""Random samples that can be learnt: sample i is a function of (seed, i), so nothing is stored."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dtrain.data import Batch, Indices, Loading
from dtrain.data.order import _mix32, _mix64

PERIOD = 7
"""next_token repeats a random phrase of this many tokens: what comes next can be copied from what was."""


@dataclass(frozen=True)
class Synthetic:
    """A Source. Inputs are uniform in [-1, 1); targets are a fixed linear map of them, or its largest row for classification."""

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
        return {"vocab": self.vocab} if self.task == "next_token" else {"inputs": list(self.inputs), "outputs": self.outputs}

    @property
    def fingerprint(self) -> str:
        return f"synthetic-{self.task}-{list(self.inputs)}-{self.outputs}-{self.vocab}-{self.sequence}-{self.samples}-{self.first}-{self.seed}"

    def __len__(self) -> int:
        return self.samples

    def take(self, index: Indices, epoch: Indices) -> Batch:
        index = index + self.first
        if self.task == "next_token":
            phrase = (self._random(index, PERIOD) * self.vocab).astype(np.int64)
            tokens = phrase[:, np.arange(self.sequence + 1) % PERIOD]
            return {"inputs": torch.from_numpy(tokens[:, :-1].copy()), "targets": torch.from_numpy(tokens[:, 1:].copy())}
        size = math.prod(self.inputs)
        x = (self._random(index, size) * 2 - 1).astype(np.float32)
        y = x @ self._map(size)
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

    def _map(self, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        weights: np.ndarray[Any, np.dtype[np.float32]] = (
            np.random.default_rng(self.seed).normal(size=(size, self.outputs), scale=size**-0.5).astype(np.float32)
        )
        return weights
