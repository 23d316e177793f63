"""The space of a sweep: the keys that have several values, or an interval, and their combinations.

    optim.lr=1e-3,3e-3   seed=range(0,4)   model=glob(g*)   optim.lr=tag(log,interval(1e-4,1e-2))

The functions are Hydra's (https://hydra.cc/docs/advanced/override_grammar/extended/), read by its parser; plain lists
are read here, without Hydra.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.compose.check import shown
from dtrain.config import grammar
from dtrain.config.word import Word, cut, spelling

MOST = 10_000
"""The most jobs of a grid."""


@dataclass(frozen=True)
class Choices:
    """The values of a key, in the order in which they are tried."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Interval:
    """All numbers from `low` to `high`; `log`: drawn by their logarithm; `whole`: integers alone."""

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high

    def text(self) -> str:
        """As it is typed."""
        ends = (spelling(int(end) if float(end).is_integer() and abs(end) < 1e15 else end) for end in self.ends)
        low, high = ends
        tags = ["int"] * self.whole + ["log"] * self.log
        return f"tag({','.join(tags)},interval({low},{high}))" if tags else f"interval({low},{high})"


Axis = Choices | Interval


def axes(swept: Iterable[Word], names: Callable[[str], Sequence[str]], seed: int) -> tuple[dict[str, Axis], list[str]]:
    """Key -> axis of the words that have several values, and the problems of those of which none can be made.
    `names(key)`: what a glob over this key may match; `seed`: of shuffle.
    """
    made, problems = dict[str, Axis](), list[str]()
    for word in swept:
        try:
            made[word.key] = _axis(word, names, seed)
        except ValueError as error:
            problems.append(f"{shown(word)}: {error}")
    return made, problems


def _axis(word: Word, names: Callable[[str], Sequence[str]], seed: int) -> Axis:
    """Raises ValueError with a sentence."""
    if isinstance(word.value, list):
        if not word.value:
            raise ValueError("no value.")
        return Choices(word.key, tuple(word.value))
    try:
        return Choices(word.key, tuple(grammar.read(word.text)))
    except grammar.Unread:
        from dtrain.compose.hydra import Bounds, sweep_of

    sweep = sweep_of(word.text, names(word.key), MOST)
    if isinstance(sweep, Bounds):
        return Interval(word.key, sweep.low, sweep.high, "log" in sweep.tags, sweep.whole)
    values, shuffled = sweep
    if shuffled:
        random.Random(f"{seed} {word.key}").shuffle(values)
    return Choices(word.key, tuple(values))


def size(space: Iterable[Axis]) -> float:
    """The number of combinations; infinite with an interval."""
    return math.prod(len(axis.values) if isinstance(axis, Choices) else math.inf for axis in space)


def grid(space: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """Every combination as key -> value; the last key changes fastest. Raises ValueError for an interval."""
    choices = [axis for axis in space if isinstance(axis, Choices)]
    if len(choices) < len(space):
        raise ValueError("an interval has no grid")
    for values in itertools.product(*(axis.values for axis in choices)):
        yield {axis.key: value for axis, value in zip(choices, values, strict=True)}


def words(values: Mapping[str, Any]) -> list[str]:
    """The values of a job as words."""
    return [f"{key}={spelling(value)}" for key, value in values.items()]


def label(values: Mapping[str, Any]) -> str:
    """The values of a job on one line."""
    return cut(" ".join(words(values)))
