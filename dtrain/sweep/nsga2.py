"""NSGA-II (Deb et al. 2002, https://doi.org/10.1109/4235.996017) for two metrics, one trial at a time: each new one is
a child of two of the best so far, where best means beaten by few in both metrics, and then far from its neighbours.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

from dtrain.sweep.conditional import Conditions
from dtrain.sweep.drawing import at, generator, position
from dtrain.sweep.space import Axis, Interval
from dtrain.sweep.trials import Trial, beats

POPULATION = 40
"""The most trials that have children; the first half as many are random."""
SPREAD = 0.1
"""Standard deviation of a mutation, as a part of the axis."""


class Genetic:
    """Keeps the population, which takes results in the order of the trials."""

    def __init__(self, axes: Sequence[Axis], conditions: Conditions, seed: int) -> None:
        self._axes, self._seed = axes, seed
        self._population, self._taken = list[Trial](), set[int]()

    def draw(self, number: int, attempt: int, past: Sequence[Trial]) -> dict[str, Any]:
        chance = generator(self._seed, number, attempt)
        for trial in past:
            if trial.losses is not None and trial.number not in self._taken:
                self._taken.add(trial.number)
                self._population = best([*self._population, trial], POPULATION)
        if len(self._taken) < POPULATION // 2:
            return {axis.key: at(axis, chance.random()) for axis in self._axes}
        first, second = (min(chance.sample(range(len(self._population)), 2)) for _ in range(2))  # of two, the better
        return self._child(self._population[first], self._population[second], chance)

    def _child(self, first: Trial, second: Trial, chance: random.Random) -> dict[str, Any]:
        """Each value of one of the parents or between both, and about one of them changed."""
        values = {}
        for axis in self._axes:
            parents = [parent.values for parent in (first, second) if axis.key in parent.values]
            if not parents or chance.random() < 1 / (2 * len(self._axes)):
                values[axis.key] = at(axis, chance.random())
                continue
            values[axis.key] = chance.choice(parents)[axis.key]
            if isinstance(axis, Interval):
                places = [position(axis, parent[axis.key]) for parent in parents]
                place = chance.uniform(min(places), max(places)) + chance.gauss(0, SPREAD) * (chance.random() < 0.5)
                values[axis.key] = at(axis, min(max(place, 0.0), 1.0))
        return values


def best(trials: Sequence[Trial], most: int) -> list[Trial]:
    """At most so many trials, the better ones first: by front, then by distance to their neighbours in it."""
    chosen = list[Trial]()
    left = list(trials)
    while left and len(chosen) < most:
        front = [trial for trial in left if not any(beats(other, trial) for other in left)]
        taken = {trial.number for trial in front}
        left = [trial for trial in left if trial.number not in taken]
        distances = _distances(front)
        chosen += sorted(front, key=lambda trial: -distances[trial.number])
    return chosen[:most]


def _distances(front: Sequence[Trial]) -> dict[int, float]:
    """The crowding distance of each: how far apart its neighbours are, in all metrics together."""
    distances = dict.fromkeys((trial.number for trial in front), 0.0)
    for place in range(len(front[0].losses or ())):
        ordered = sorted(front, key=lambda trial: (trial.losses or ())[place])
        losses = [(trial.losses or ())[place] for trial in ordered]
        width = losses[-1] - losses[0]
        distances[ordered[0].number] = distances[ordered[-1].number] = math.inf
        for before, trial, after in zip(losses, ordered[1:-1], losses[2:], strict=False):
            distances[trial.number] += (after - before) / width if 0 < width < math.inf else 0.0
    return distances
