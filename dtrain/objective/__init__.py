"""What is minimised. An objective returns sums, and the count they are to be divided by: the mean is then right on every mesh.

Means of means are wrong as soon as two microbatches count differently (https://github.com/huggingface/transformers/issues/34242).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

from dtrain.data import Batch
from dtrain.errors import WordsError


@dataclass(frozen=True)
class Loss:
    """Sums over one microbatch, 0-dim tensors on the device; each is divided by the count of the whole batch of the world."""

    sum: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    @property
    def unit(self) -> str:
        """What is counted: `tokens` or `samples`, for the throughput."""
        ...

    def count(self, batch: Batch) -> int:
        """How many terms the sum over this batch has; read on the CPU, before the batch moves to the device."""
        ...

    def inputs(self, batch: Batch) -> Any:
        """What the model is called with: a tensor, or a mapping of keyword arguments."""
        ...

    def loss(self, outputs: Any, batch: Batch) -> Loss: ...


def answer(outputs: Any) -> Tensor:
    """The logits, whole also where tensor parallelism left them split."""
    logits = logits_of(outputs)
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


IGNORE = -100
"""Whole-number targets with this value do not count."""


def logits_of(outputs: Any) -> Tensor:
    """The tensor a model returned, bare or as `logits` of an object or a mapping. Raises WordsError when there is none."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if not isinstance(found, Tensor):
        raise WordsError(f"model: it returns a {type(outputs).__name__}. A tensor is needed, or an object or a mapping with `logits`.")
    return found
