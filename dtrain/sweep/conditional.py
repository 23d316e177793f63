"""Words that exist only under another one: `optim.momentum` belongs to optim=sgd, and a job with optim=adamw goes
without it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dtrain.compose.check import Vocabulary
from dtrain.config.schema import GROUPS, LISTS
from dtrain.sweep.space import Axis, Choices

Conditions = Mapping[str, tuple[str, frozenset[str]]]
"""Key -> its group, and the words of that group that have it."""


def conditions(keys: Iterable[str], space: Sequence[Axis], vocabulary: Vocabulary) -> Conditions:
    """Those of `keys` that only some of the words have that are swept for their group. A key that none of them has is
    a mistake, which its job tells.
    """
    keys = list(keys)
    swept = {axis.key: axis.values for axis in space if isinstance(axis, Choices) and axis.key in GROUPS}
    named = {group: [word for word in words if isinstance(word, str)] for group, words in swept.items()}
    having = dict[str, tuple[str, frozenset[str]]]()
    for key in keys:
        group, _, name = key.partition(".")
        if not name or group not in named or group in LISTS or f"{group}._target_" in keys:
            continue
        words = [word for word in named[group] if name.split(".")[0] in vocabulary.node(group, word)]
        if words:
            having[key] = group, frozenset(words)
    return having


def exists(key: str, values: Mapping[str, Any], conditions: Conditions) -> bool:
    """Whether the job with these values has the word `key`."""
    group, words = conditions.get(key, ("", frozenset[str]()))
    return not group or values[group] in words


def corners(space: Sequence[Axis], conditions: Conditions) -> Iterator[dict[str, Any]]:
    """Values in which every value of a list and both ends of every interval occur, each where it exists."""
    ends = {axis.key: _ends(axis) for axis in space}
    first = {key: values[0] for key, values in ends.items()}
    yield first
    for key, values in ends.items():
        group, words = conditions.get(key, ("", frozenset[str]()))
        under = {group: min(words)} if group else {}
        for value in values if group else values[1:]:
            yield {**first, **under, key: value}


def _ends(axis: Axis) -> Sequence[Any]:
    if isinstance(axis, Choices):
        return axis.values
    return (int(axis.low), int(axis.high)) if axis.whole else (axis.low, axis.high)
