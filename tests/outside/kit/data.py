"""Sines of several lengths, to be told apart."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from dtrain.data import Batch, Indices, Loading


@dataclass(frozen=True)
class Waves:
    about: ClassVar = {"gives": "samples", "dense": True, "loading": "thread"}
    samples: int
    first: int = 0
    dense: ClassVar[bool] = True
    loading: ClassVar[Loading] = "thread"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"inputs": [16], "outputs": 4}

    @property
    def fingerprint(self) -> str:
        return f"waves-{self.first}-{self.samples}"

    def __len__(self) -> int:
        return self.samples

    def take(self, index: Indices, epoch: Indices) -> Batch:
        index = index + self.first
        kind, shift = index % 4, (index // 4 % 97) / 97
        x = np.sin(2 * np.pi * ((kind[:, None] + 1) * np.arange(16) / 16 + shift[:, None]))
        return {"inputs": torch.from_numpy(x.astype(np.float32)), "targets": torch.from_numpy(kind.astype(np.int64))}

    def holdout(self) -> "Waves | None":
        return replace(self, first=self.samples, samples=64) if self.first == 0 else None
