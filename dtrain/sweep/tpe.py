"""Tree-structured Parzen estimators (Bergstra et al. 2011, https://papers.nips.cc/paper/4443), as Optuna has them:
values that are likelier among the good trials than among the others.

A trial that has not ended counts as one of the others, so that those which run at the same time differ.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from dtrain.sweep.conditional import Conditions, exists
from dtrain.sweep.drawing import rounded, seed_of
from dtrain.sweep.space import Axis, Choices
from dtrain.sweep.trials import Trial

optuna.logging.set_verbosity(optuna.logging.ERROR)


class TreeParzen:
    """Holds the trials so far in a study of Optuna's, in memory."""

    def __init__(self, axes: Sequence[Axis], conditions: Conditions, seed: int) -> None:
        self._axes = sorted(axes, key=lambda axis: axis.key in conditions)  # what others depend on comes first
        self._conditions, self._seed = conditions, seed
        self._is_joint = not any(isinstance(axis, Choices) for axis in axes)
        """Whether keys are drawn together; with lists that got stuck at the wrong value of one in 9 of 20 seeds, alone
        in 2.
        """
        self._study = optuna.create_study()
        self._numbers, self._running, self._size = dict[int, int](), set[int](), 0
        """The number of each trial in that study; those that have not ended; how many it has."""

    def draw(self, number: int, attempt: int, past: Sequence[Trial]) -> dict[str, Any]:
        self._learn(past)
        seed = seed_of(self._seed, number, attempt)
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=self._is_joint)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = self._study.ask()
            values = dict[str, Any]()
            for axis in self._axes:
                if exists(axis.key, values, self._conditions):
                    values[axis.key] = _suggested(trial, axis)
            self._study.tell(trial, state=TrialState.FAIL)  # it comes again as it is recorded, with its number
        self._size += 1
        return values

    def _learn(self, past: Sequence[Trial]) -> None:
        """Add the trials that are new, and how those have ended that ran."""
        for trial in past:
            if trial.number in self._numbers:
                if trial.number in self._running and trial.losses is not None:
                    self._running.discard(trial.number)
                    self._study.tell(self._numbers[trial.number], trial.losses[0])
                continue
            self._study.add_trial(self._frozen(trial))
            self._numbers[trial.number] = self._size
            self._size += 1
            if trial.losses is None:
                self._running.add(trial.number)

    def _frozen(self, trial: Trial) -> optuna.trial.FrozenTrial:
        axes = [axis for axis in self._axes if axis.key in trial.values]
        state = TrialState.RUNNING if trial.losses is None else TrialState.COMPLETE
        return optuna.create_trial(
            state=state,
            value=None if trial.losses is None else trial.losses[0],
            params={axis.key: _internal(axis, trial.values) for axis in axes},
            distributions={axis.key: _distribution(axis) for axis in axes},
        )


def _distribution(axis: Axis) -> BaseDistribution:
    """The choices of a list are known by their places, as Optuna takes no lists or mappings."""
    if isinstance(axis, Choices):
        return CategoricalDistribution(range(len(axis.values)))
    if axis.whole:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


def _internal(axis: Axis, values: Mapping[str, Any]) -> Any:
    return axis.values.index(values[axis.key]) if isinstance(axis, Choices) else values[axis.key]


def _suggested(trial: optuna.Trial, axis: Axis) -> Any:
    if isinstance(axis, Choices):
        return axis.values[trial.suggest_categorical(axis.key, range(len(axis.values)))]
    if axis.whole:
        return trial.suggest_int(axis.key, int(axis.low), int(axis.high), log=axis.log)
    return rounded(axis, trial.suggest_float(axis.key, axis.low, axis.high, log=axis.log))
