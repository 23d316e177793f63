"""The dataset of a table of tasks, which tables of models share."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

SAMPLES = 64


class Samples:
    """Sample i of a task is a function of i and of a generator that i seeds. A subclass has the table."""

    tasks: ClassVar[Mapping[str, Any]]

    def __init__(self, *, task: str) -> None:
        self._sample = self.tasks[task].sample

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        made: dict[str, Tensor] = self._sample(index, torch.Generator().manual_seed(index))
        return made
