"""Tensors and numbers that an objective holds: parameters, which nothing would train, and state that it changes."""

from collections.abc import Iterator, Mapping
from inspect import isroutine
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.objective import Objective

DEPTH = 4
"""Attributes, items and elements that a path may have."""
MOST = 1000
"""Items of a container that is looked into; a vocabulary has more."""
INNER = frozenset(vars(nn.Module()))
"""Attributes that torch gives each module."""
Leaf = Tensor | int | float


def check_parameters(objective: Objective) -> None:
    """Raises WordsError for a parameter of the objective that asks for a gradient: no optimizer and no checkpoint would
    have it.
    """
    for name, leaf in leaves_of(objective):
        if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad:
            raise WordsError(
                f"objective {type(objective).__name__}: its parameter {name} {list(leaf.shape)} would be neither "
                "trained nor saved: the optimizer and checkpoints have the parameters of the model. Put it in the "
                "model, and let the forward return what the loss needs of it. If it is not to be trained, call "
                "requires_grad_(False)."
            )


class Changes:
    """Finds state that an objective changes and no checkpoint has, such as a running mean or a queue."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.again()

    def again(self) -> None:
        """Begin to watch once more."""
        self._done = False
        self._before: dict[str, tuple[Leaf, int]] | None = None

    def names(self) -> list[str]:
        """Call after every step: after the second one, returns the names of tensors and numbers that it has changed. A
        cache is filled in the first.
        """
        if self._done:
            return []
        now = {name: (leaf, _version(leaf)) for name, leaf in leaves_of(self._objective)}
        before, self._before = self._before, now
        if before is None:
            return []
        self._done = True
        return [name for name, leaf in now.items() if name in before and _differ(before[name], leaf)]


def _differ(before: tuple[Leaf, int], now: tuple[Leaf, int]) -> bool:
    if isinstance(now[0], Tensor) or isinstance(before[0], Tensor):
        return before[0] is not now[0] or before[1] != now[1]
    return before[0] != now[0]


def _version(leaf: Leaf) -> int:
    """How often it was written."""
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def leaves_of(thing: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Leaf]]:
    """(path, leaf) of each tensor and number that an object holds in attributes, modules and containers."""
    seen = set() if seen is None else seen
    if type(thing) in (int, float) or isinstance(thing, Tensor):
        yield path, thing
    elif id(thing) not in seen and path.count(".") < DEPTH:
        seen.add(id(thing))
        for name, part in _parts(thing):
            yield from leaves_of(part, f"{path}.{name}".removeprefix("."), seen)


def _parts(thing: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(thing, Mapping | list | tuple):
        items = thing.items() if isinstance(thing, Mapping) else enumerate(thing)
        yield from items if len(thing) <= MOST else ()
    elif isinstance(thing, nn.Module):
        yield from [*thing.named_parameters(), *thing.named_buffers()]
        for name, module in thing.named_modules():
            mine = ((key, value) for key, value in vars(module).items() if key not in INNER)
            yield from ((f"{name}.{key}".removeprefix("."), value) for key, value in mine)
    elif hasattr(thing, "__dict__") and not isinstance(thing, type | ModuleType) and not isroutine(thing):
        yield from vars(thing).items()
