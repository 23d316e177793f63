"""The Sobol sequence: points that fill a cube evenly, whenever one stops (Sobol 1967), with the direction numbers of
Joe and Kuo 2008 (https://web.maths.unsw.edu.au/~fkuo/sobol/) and a random digital shift for each seed.
"""

import random
from collections.abc import Sequence
from typing import Any

from dtrain.sweep.conditional import Conditions
from dtrain.sweep.drawing import at, generator
from dtrain.sweep.space import Axis
from dtrain.sweep.trials import Trial

BITS = 30
DIRECTIONS = (
    (0, ()),
    (0, (1,)),
    (1, (1, 3)),
    (1, (1, 3, 1)),
    (2, (1, 1, 1)),
    (1, (1, 1, 3, 3)),
    (4, (1, 3, 5, 13)),
    (2, (1, 1, 5, 5, 17)),
    (4, (1, 1, 5, 5, 5)),
    (7, (1, 1, 7, 11, 19)),
    (11, (1, 1, 5, 1, 1)),
    (13, (1, 1, 1, 3, 11)),
    (14, (1, 3, 5, 5, 31)),
    (1, (1, 3, 3, 9, 7, 49)),
    (13, (1, 1, 1, 15, 21, 21)),
    (16, (1, 3, 1, 13, 27, 49)),
    (19, (1, 1, 1, 15, 7, 5)),
    (22, (1, 3, 1, 15, 13, 25)),
    (25, (1, 1, 5, 5, 19, 61)),
    (1, (1, 3, 7, 11, 23, 15, 103)),
    (4, (1, 3, 7, 13, 13, 15, 69)),
)
"""Of each dimension: the inner coefficients of its primitive polynomial, and its first direction numbers."""


class Sobol:
    """Values at the points of the sequence."""

    def __init__(self, axes: Sequence[Axis], conditions: Conditions, seed: int) -> None:
        self._axes, self._seed = axes, seed
        self._directions = [_directions(*DIRECTIONS[place]) for place in range(len(axes))]
        chance = random.Random(f"{seed} shift")
        self._shifts = [chance.getrandbits(BITS) for _ in axes]

    def draw(self, number: int, attempt: int, past: Sequence[Trial]) -> dict[str, Any]:
        if attempt:
            chance = generator(self._seed, number, attempt)
            return {axis.key: at(axis, chance.random()) for axis in self._axes}
        pairs = zip(self._axes, self._directions, self._shifts, strict=True)
        return {axis.key: at(axis, (point(number, each) ^ shift) / (1 << BITS)) for axis, each, shift in pairs}


def point(number: int, directions: Sequence[int]) -> int:
    """One coordinate of a point of the sequence, times 2^BITS."""
    gray, value = number ^ (number >> 1), 0
    for direction in directions:
        value ^= direction * (gray & 1)
        gray >>= 1
    return value


def _directions(polynomial: int, first: Sequence[int]) -> list[int]:
    """The direction numbers of a dimension, times 2^BITS: for each bit of the number of a point."""
    degree = len(first)
    if not degree:
        return [1 << (BITS - 1 - bit) for bit in range(BITS)]
    numbers = [each << (BITS - 1 - bit) for bit, each in enumerate(first)]
    for bit in range(degree, BITS):
        value = numbers[bit - degree] ^ (numbers[bit - degree] >> degree)
        for place in range(1, degree):
            value ^= numbers[bit - place] * (polynomial >> (degree - 1 - place) & 1)
        numbers.append(value)
    return numbers
