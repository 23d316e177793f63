"""Runs that differ in `seed` alone: the mean of their figures, and how far seeds move it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtrain.report.runs import Run

SEED = "seed"
ITS_OWN = (SEED, "out")
"""Words that runs of one group may differ in."""


@dataclass(frozen=True)
class Group:
    """`words`: what its runs share; `figures`: name -> (mean, standard deviation of a sample)."""

    words: Mapping[str, str]
    runs: int
    figures: Mapping[str, tuple[float, float]]


def groups(runs: Sequence[Run]) -> list[Group]:
    """A group of each two or more finished runs with the same words and steps and other seeds, in their order. Figures
    that only some of them have are left out.
    """
    alike: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        shared = [(key, text) for key, text in run.words.items() if key not in ITS_OWN]
        if run.status == "finished":
            alike.setdefault((run.step, *sorted(shared)), []).append(run)
    several = [group for group in alike.values() if len({run.words.get(SEED) for run in group}) == len(group) > 1]
    return [_group(group) for group in several]


def _group(runs: Sequence[Run]) -> Group:
    first = runs[0]
    values = {name: [run.compared[name] for run in runs if name in run.compared] for name in first.compared}
    figures = {
        name: (statistics.fmean(known), statistics.stdev(known))
        for name, known in values.items()
        if len(known) == len(runs)
    }
    return Group({key: text for key, text in first.words.items() if key not in ITS_OWN}, len(runs), figures)
