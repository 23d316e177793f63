"""An adapter as the rest of a run sees it: layers with added parameters, and facts for a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class Adapted(Protocol):
    """A layer to which an adapter has added parameters."""

    added: Sequence[str]
    """Their names in the layer."""
    off: bool
    """Whether it computes what it did without them."""

    def init_added(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        """Initialise an added parameter (whole, on the CPU) in place, with random numbers from `generator` alone."""

    def begin(self) -> None:
        """Set the added parameters that begin as a function of the layer's weights, which are filled by now."""


@runtime_checkable
class Packed(Protocol):
    """A layer that holds its frozen `weight` in fewer bits; the parameter itself is on the meta device."""

    @property
    def bits(self) -> float:
        """Of a number, with its part of what is held beside them."""
        ...

    def pack(self, weight: Tensor) -> None:
        """Hold these numbers, [out, in] on the device that computes, from now on."""
        ...


def mark(model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Note the facts of the adapter of a model, as JSON: `kind`, and its arguments."""
    vars(model)["_adapter"] = facts


def adapter_of(model: nn.Module) -> Mapping[str, Any] | None:
    """The facts of the adapter of a model, None if it has none; a stage of a pipeline knows them too."""
    facts: Mapping[str, Any] | None = vars(model).get("_adapter")
    return facts


def layers(model: nn.Module) -> dict[str, Adapted]:
    """The layers with added parameters, by name."""
    if adapter_of(model) is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def added(model: nn.Module) -> dict[str, Adapted]:
    """Name of every added parameter -> its layer."""
    return {f"{name}.{each}": layer for name, layer in layers(model).items() for each in layer.added}


def packed(model: nn.Module) -> dict[str, Packed]:
    """Name of every weight that its layer packs -> the layer."""
    if adapter_of(model) is None:
        return {}
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Packed)}


def lacks_memory(model: nn.Module) -> bool:
    """Whether there are parameters on the meta device for which memory is to be allocated."""
    kept = packed(model)
    return any(parameter.is_meta for name, parameter in model.named_parameters() if name not in kept)


def begin(model: nn.Module) -> None:
    """Let each layer derive what it begins with from its weights; all ranks call it."""
    for layer in layers(model).values():
        layer.begin()


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """A context in which the layers compute what they did without the adapter."""
    mine = layers(model).values()
    for layer in mine:
        layer.off = True
    try:
        yield
    finally:
        for layer in mine:
            layer.off = False
