"""Types of numbers: facts that the strategy, the step and the clip read."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, library, nn

NORMS = {"layer_norm": (2, 3), "group_norm": (2, 3), "batch_norm": (1, 2), "instance_norm": (1, 2)}
"""Operator -> positions of its weight and bias among its arguments"""


class LossScale:
    """Dynamic loss scale of fp16 (arXiv 1710.03740): the same on all ranks, since it follows the global gradient
    norm.
    """

    def __init__(self, value: float, *, growth: int) -> None:
        self.value, self._growth, self._good = value, growth, 0
        self.skipped = 0
        """Steps that were not applied, since the beginning of the run."""

    def accept(self, norm: float | Tensor) -> bool:
        """Whether to apply a step with this global gradient norm; adapts the scale. Waits for the device if the norm is
        a tensor on it.
        """
        finite = math.isfinite(norm)
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value, self.skipped = max(self.value / 2, 1.0), self.skipped + 1
        elif self._good == self._growth:
            self.value, self._good = self.value * 2, 0
        return finite

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self._good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good, self.skipped = state["value"], state["good"], state.get("skipped", 0)


@dataclass(frozen=True)
class Precision:
    """`param`: weights at rest, gradients and optimizer; `compute`: matrix products; `reduce`: gradients in
    collectives. `tf32`: whether a GPU may round fp32 inputs of products to TensorFloat-32. `convert`: changes layers in
    the blocks of a model, in place, if types are not enough.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    scale: LossScale | None = None
    tf32: bool = False
    convert: Callable[[nn.Module], None] | None = None

    def choose_products(self) -> None:
        """Set the fp32 products of this process, whatever was set before: torch's default rounds convolutions, and
        imported code may have changed it.
        """
        torch.set_float32_matmul_precision("high" if self.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = self.tf32

    def scaled_by(self, ranks: int) -> float:
        """The divisor of gradients that were averaged over `ranks`."""
        return self.scale.value / ranks if self.scale else 1.0

    def columns(self) -> dict[str, float]:
        """The columns of a row after a step: with a loss scale its value for the next step, and the steps skipped so
        far.
        """
        return {"loss_scale": self.scale.value, "skipped_steps": self.scale.skipped} if self.scale else {}

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.compute == self.param:
            return nullcontext()
        if device.type == "cpu":
            _norms_on_the_cpu()
        return torch.autocast(device.type, dtype=self.compute)


@cache
def _norms_on_the_cpu() -> library.Library:
    """Parameters of a norm that were gathered in half precision are fp32 beside what is fp32, as autocast makes them on
    a GPU.

    On the CPU it leaves them, and torch refuses the pair
    (https://docs.pytorch.org/docs/stable/amp.html#cpu-op-specific-behavior).
    """
    operators = library.Library("aten", "IMPL")
    for name, places in NORMS.items():
        operator = getattr(torch.ops.aten, name).default
        operators.impl(name, _with_parameters_as_its_input(operator, *places), "AutocastCPU")
    return operators


def _with_parameters_as_its_input(operator: Callable[..., Any], *parameters: int) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        others = (each for place, each in enumerate(args) if place not in parameters)
        if any(isinstance(each, Tensor) and each.dtype == torch.float32 for each in others):
            wide = {place: args[place].float() for place in parameters if args[place] is not None}
            args = tuple(wide.get(place, each) for place, each in enumerate(args))
        with torch.autocast("cpu", enabled=False):
            return operator(*args)

    return run
