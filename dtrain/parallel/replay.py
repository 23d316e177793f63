"""Calls a module again as it was called in a forward: from the same arguments, buffers and attributes, with its weights
as they are or whole.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dtrain.mesh.sharding import like, region
from dtrain.model import GENERATORS, seeds
from dtrain.parallel.tensor import SPLIT


class State:
    """Attributes and buffers of a module and those in it, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = [(each, dict(vars(each)), dict(each._buffers)) for each in module.modules()]
        self._values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        self._generators = [(each, _place(each)) for each in _generators(module)]

    @torch.no_grad()
    def put_back(self) -> None:
        for module, attributes, buffers in self._kept:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, value in self._values:
            buffer.copy_(value)
        for generator, place in self._generators:
            _go_to(generator, place)

    def drew(self) -> bool:
        """Whether a generator of the module's own has moved since."""
        return any(_text(_place(each)) != _text(place) for each, place in self._generators)


@dataclass
class Call:
    """A call of a module: the leaves of its arguments, and its state before."""

    module: nn.Module
    leaves: list[Any]
    spec: Any
    state: State
    _zeros: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, module: nn.Module, args: Any, kwargs: Any) -> "Call":
        leaves, spec = tree_flatten((args, kwargs))
        return cls(module, [_copied(leaf) for leaf in leaves], spec, State(module))

    def first(self) -> int | None:
        """The index of the first floating tensor among the leaves."""
        return next((i for i, leaf in enumerate(self.leaves) if is_floating(leaf)), None)

    def run(self, leaves: list[Any]) -> Tensor | None:
        """The first floating tensor that the forward returns, without the module's own hooks."""
        args, kwargs = tree_unflatten(leaves, self.spec)
        returned = tree_flatten(self.module.forward(*args, **kwargs))[0]
        out = next((leaf for leaf in returned if is_floating(leaf)), None)
        return out.full_tensor() if isinstance(out, DTensor) else out

    def copies(self, leaves: list[Any], *, wide: bool) -> list[Any]:
        """Leaves that a call may change; `wide`: 16-bit ones in fp32."""
        return [_wide(_copied(leaf)) if wide and isinstance(leaf, Tensor) else _copied(leaf) for leaf in leaves]

    @contextmanager
    def weights(self, *, whole: bool, wide: bool) -> Iterator[dict[str, nn.Parameter]]:
        """A context in which the module has copies of its weights, by name: gathered if they are split and `whole`, in
        fp32 if `wide`. One that is all zeros hides what is multiplied by it, so it gets random numbers; the call with
        whole weights comes first.
        """
        made, named, places = dict[int, nn.Parameter](), dict[str, nn.Parameter](), list[tuple[Any, str, Any]]()
        try:
            for path, module in self.module.named_modules():
                for name, weight in list(module._parameters.items()):
                    if weight is None:
                        continue
                    full = f"{path}.{name}" if path else name
                    if id(weight) not in made:
                        value = self._value(full, weight, split=module in SPLIT, whole=whole)
                        value = _wide(value) if wide else value
                        made[id(weight)] = named[full] = nn.Parameter(value, requires_grad=weight.requires_grad)
                    places.append((module, name, weight))
                    module._parameters[name] = made[id(weight)]
            yield named
        finally:
            for module, name, weight in places:
                module._parameters[name] = weight

    def _value(self, name: str, weight: Tensor, *, split: bool, whole: bool) -> Tensor:
        value = weight.detach()
        if not value.is_floating_point() or (isinstance(value, DTensor) and not split):
            return value
        if whole:
            value = value.full_tensor() if isinstance(value, DTensor) else value
            if value.any():
                return value
            self._zeros.add(name)
        elif name not in self._zeros:
            return value
        numbers = torch.randn(weight.shape, generator=seeds.generator(0, "weight of a check", name))
        numbers *= weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.1
        return numbers.to(value) if whole else like(numbers[region(weight)].to(_local_of(value)), weight)


def is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _local_of(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


def _copied(leaf: Any) -> Any:
    """A copy of a tensor; keys and values that a model of transformers keeps for words to come are left out."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    kept = getattr(sys.modules.get("transformers.cache_utils"), "Cache", ())
    return None if isinstance(leaf, kept) else leaf


def _generators(module: nn.Module) -> list[Any]:
    return [value for each in module.modules() for value in vars(each).values() if isinstance(value, GENERATORS)]


def _place(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _go_to(generator: Any, place: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = place
    elif isinstance(generator, random.Random):
        generator.setstate(place)
    else:
        generator.set_state(place)


def _text(place: Any) -> str:
    return str(place.tolist() if isinstance(place, Tensor) else place)
