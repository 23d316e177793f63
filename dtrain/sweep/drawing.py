"""How a search draws the values of a trial: from its number, the seed of the sweep and the trials before it, and from
nothing else. So a search that was killed draws what it would have drawn.
"""

import hashlib
import importlib
import math
import random
from collections.abc import Sequence
from typing import Any, Protocol

from dtrain.sweep import space
from dtrain.sweep.conditional import Conditions
from dtrain.sweep.space import Axis, Choices
from dtrain.sweep.study import Study
from dtrain.sweep.trials import Trial

DIGITS = 6
"""Significant digits of a number that is drawn: it reads well, and is the same number when it is typed."""
SAMPLERS = {
    "random": "dtrain.sweep.drawing.Random",
    "sobol": "dtrain.sweep.sobol.Sobol",
    "tpe": "dtrain.sweep.tpe.TreeParzen",
    "cmaes": "dtrain.sweep.cma.CovarianceMatrix",
    "nsga2": "dtrain.sweep.nsga2.Genetic",
}


class Sampler(Protocol):
    """Each is made of the axes, the words that exist only under another, and the seed."""

    def draw(self, number: int, attempt: int, past: Sequence[Trial]) -> dict[str, Any]:
        """The values of trial `number`, at least of the keys that exist in its job. `attempt`: how often in a row they
        were values of an earlier trial; `past`: those before it, in their order.
        """
        ...


def sampler_of(study: Study, axes: Sequence[Axis], conditions: Conditions) -> Sampler:
    module, _, name = SAMPLERS[study.method].rpartition(".")
    sampler: Sampler = getattr(importlib.import_module(module), name)(axes, conditions, study.seed)
    return sampler


class Random:
    """Independent values; of lists alone every combination once, in a random order."""

    def __init__(self, axes: Sequence[Axis], conditions: Conditions, seed: int) -> None:
        self._axes, self._seed = axes, seed
        size = space.size(axes)
        self._order = list(range(int(size))) if size <= space.MOST else []
        random.Random(f"{seed} order").shuffle(self._order)

    def draw(self, number: int, attempt: int, past: Sequence[Trial]) -> dict[str, Any]:
        if number < len(self._order) and not attempt:
            return self._combination(self._order[number])
        chance = generator(self._seed, number, attempt)
        return {axis.key: at(axis, chance.random()) for axis in self._axes}

    def _combination(self, index: int) -> dict[str, Any]:
        values = {}
        for axis in self._axes:
            assert isinstance(axis, Choices)
            index, place = divmod(index, len(axis.values))
            values[axis.key] = axis.values[place]
        return values


def generator(seed: int, number: int, attempt: int) -> random.Random:
    """The random numbers of one draw."""
    return random.Random(f"{seed} {number} {attempt}")


def seed_of(seed: int, number: int, attempt: int) -> int:
    """32 bits for a library's own generator."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number} {attempt}".encode()).digest()[:4])


def at(axis: Axis, position: float) -> Any:
    """The value at a position from 0 to 1."""
    if isinstance(axis, Choices):
        return axis.values[min(int(position * len(axis.values)), len(axis.values) - 1)]
    low, high = (axis.low - 0.5, axis.high + 0.5) if axis.whole else (axis.low, axis.high)
    if axis.log:
        value = math.exp(math.log(low) + position * (math.log(high) - math.log(low)))
    else:
        value = low + position * (high - low)
    return rounded(axis, value)


def rounded(axis: Axis, value: Any) -> Any:
    """A value of the axis as it is written: an integer, or a number of few digits, inside of its ends."""
    if isinstance(axis, Choices):
        return value
    value = min(max(value, axis.low), axis.high)
    if axis.whole:
        return round(value)
    return min(max(float(f"{value:.{DIGITS}g}"), axis.low), axis.high)


def position(axis: Axis, value: Any) -> float:
    """The inverse of `at`; in the middle of the positions that have the same value."""
    if isinstance(axis, Choices):
        return (axis.values.index(value) + 0.5) / len(axis.values)
    low, high = (axis.low - 0.5, axis.high + 0.5) if axis.whole else (axis.low, axis.high)
    if axis.log:
        return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return float((value - low) / (high - low))
