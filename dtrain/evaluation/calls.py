"""Whether a model computes the same each time it is called with the same input, weights, saved buffers and random
numbers. One that counts its calls in an attribute, or changes after some of them, does not, and no checkpoint has what
it keeps.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dtrain.model import saved_buffers

CALLS, FEWEST, SECONDS = 64, 16, 10.0
"""Calls of a model that are compared: at most 64; after 16 of them, none that would begin later than this."""
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Relative differences that fast kernels may cause; of other types 5e-2."""


def watch(model: nn.Module, tell: Callable[[int | None], None]) -> None:
    """At the first call of `model`, call it again and again with the same, and `tell` the number of the first call
    whose output differs, counted from 1; None if none does, or if its forward writes into its parameters. Its saved
    buffers are then no longer those of its first call.
    """
    before: dict[str, Any] = {}

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first.remove()
        before["input"], before["draws"], before["versions"] = _copy((args, kwargs)), _draws(), _versions(model)
        before["buffers"] = [(module, name, buffer.clone()) for module, name, buffer in saved_buffers(model)]

    def end(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        last.remove()
        tell(_first_other(model, before, output) if before["versions"] == _versions(model) else None)

    first = model.register_forward_pre_hook(begin, with_kwargs=True)
    last = model.register_forward_hook(end, with_kwargs=True)


def _first_other(model: nn.Module, before: dict[str, Any], output: Any) -> int | None:
    began, expected = time.monotonic(), [*_numbers(output)]
    for number in range(2, CALLS + 1):
        if number > FEWEST and time.monotonic() - began > SECONDS:
            break
        _restore(before["buffers"])
        _draw_from(before["draws"])
        args, kwargs = _copy(before["input"])
        if not _alike(expected, [*_numbers(model(*args, **kwargs))]):
            return number
    return None


def _copy(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), tree)


def _versions(model: nn.Module) -> list[int]:
    return [parameter._version for parameter in model.parameters()]


def _numbers(output: Any) -> Iterator[Tensor]:
    """The floating tensors of an output: a tensor, or what holds tensors, such as an object with attributes."""
    for leaf in tree_leaves(output):
        parts = [leaf] if isinstance(leaf, Tensor) else tree_leaves(getattr(leaf, "__dict__", {}))
        yield from (part.detach() for part in parts if isinstance(part, Tensor) and part.is_floating_point())


def _alike(here: list[Tensor], there: list[Tensor]) -> bool:
    return len(here) == len(there) and all(map(_is_same, here, there))


def _is_same(here: Tensor, there: Tensor) -> bool:
    if here.shape != there.shape or here.dtype != there.dtype:
        return False
    tolerance = TOLERANCES.get(here.dtype, 5e-2)
    here, there = here.double().nan_to_num(), there.double().nan_to_num()
    return bool((here - there).norm() <= tolerance * here.norm())


@torch.no_grad()
def _restore(buffers: list[tuple[nn.Module, str, Tensor]]) -> None:
    for module, name, value in buffers:
        now = module._buffers[name]
        if now is not None and now.shape == value.shape:
            now.copy_(value)


def _draws() -> Any:
    """The states of the generators of torch, numpy and Python."""
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), on_gpu, np.random.get_state(), random.getstate()


def _draw_from(states: Any) -> None:
    on_cpu, on_gpu, of_numpy, of_python = states
    torch.set_rng_state(on_cpu)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu)
    np.random.set_state(of_numpy)
    random.setstate(of_python)
