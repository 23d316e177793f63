"""Which numbers are kept in which type: facts that the strategy, the step and the clip read."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class LossScale:
    """Dynamic loss scale of fp16 (arXiv 1710.03740): the same on all ranks, because it follows the global gradient norm."""

    def __init__(self, value: float, *, growth: int) -> None:
        self.value, self._growth, self._good = value, growth, 0

    def accept(self, norm: torch.Tensor) -> bool:
        """Whether a step with this global gradient norm may be taken; adapts the scale. Waits for the device."""
        finite = bool(torch.isfinite(norm))
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value = max(self.value / 2, 1.0)
        elif self._good == self._growth:
            self.value, self._good = self.value * 2, 0
        return finite

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self._good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good = state["value"], state["good"]


@dataclass(frozen=True)
class Precision:
    """`param`: weights at rest, gradients and optimizer; `compute`: matrix products; `reduce`: gradients on the wire.

    `convert` changes the blocks of a model, in place, where types are not enough.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    scale: LossScale | None = None
    convert: Callable[[Sequence[nn.Module]], None] | None = None

    def scaled_by(self, ranks: int) -> float:
        """What gradients averaged over `ranks` are to be divided by."""
        return self.scale.value / ranks if self.scale else 1.0

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.compute == self.param:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute)
