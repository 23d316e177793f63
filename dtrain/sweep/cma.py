"""CMA-ES (Hansen, https://arxiv.org/abs/1604.00772), by the package `cmaes`: a normal distribution that moves towards
the best trials and takes their shape. Values of lists are drawn at random beside it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from cmaes import CMA

from dtrain.sweep.conditional import Conditions
from dtrain.sweep.drawing import at, generator, position, seed_of
from dtrain.sweep.space import Axis, Choices, Interval
from dtrain.sweep.trials import Trial

SIGMA = 1 / 4
"""The first standard deviation, as a part of an interval."""
MIDDLE = 0.5
"""Stands for a value that does not exist in a trial."""


class CovarianceMatrix:
    """Takes results in the order of the trials, as many at a time as a population has. Those drawn while it was
    evaluated come from the distribution before, so that nobody waits for the end of a population.
    """

    def __init__(self, axes: Sequence[Axis], conditions: Conditions, seed: int) -> None:
        self._intervals = [axis for axis in axes if isinstance(axis, Interval)]
        self._choices = [axis for axis in axes if isinstance(axis, Choices)]
        self._seed, self._starts, self._taken = seed, 0, set[int]()
        self._cma = self._start()

    def draw(self, number: int, attempt: int, past: Sequence[Trial]) -> dict[str, Any]:
        self._learn(past)
        self._cma.reseed_rng(seed_of(self._seed, number, attempt))
        chance = generator(self._seed, number, attempt)
        values = {axis.key: at(axis, chance.random()) for axis in self._choices}
        return values | {axis.key: at(axis, x) for axis, x in zip(self._intervals, self._cma.ask(), strict=True)}

    def _learn(self, past: Sequence[Trial]) -> None:
        ended = [trial for trial in past if trial.losses is not None and trial.number not in self._taken]
        size = self._cma.population_size
        for begin in range(0, len(ended) - size + 1, size):
            population = sorted(ended[begin : begin + size], key=lambda trial: trial.losses or ())
            self._taken |= {trial.number for trial in population}
            self._cma.tell([(self._point(trial), rank) for rank, trial in enumerate(population)])
            if self._cma.should_stop():
                self._cma = self._start()

    def _point(self, trial: Trial) -> np.ndarray:
        return np.array(
            [position(axis, trial.values[axis.key]) if axis.key in trial.values else MIDDLE for axis in self._intervals]
        )

    def _start(self) -> CMA:
        """From the middle, and when it has come to rest from a random point."""
        chance = generator(self._seed, self._starts, 0)
        mean = np.array([chance.random() if self._starts else MIDDLE for _ in self._intervals])
        self._starts += 1
        return CMA(mean, SIGMA, np.tile((0.0, 1.0), (len(mean), 1)))
