"""Population based training (https://arxiv.org/abs/1711.09846): all jobs train together, and after every rung the worst
ones go on from the checkpoints of the best, with words a little changed.

Who takes from whom, and what changes, depends on the losses at the rung and on the seed alone.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from dtrain.sweep.folder import Job
from dtrain.sweep.rungs import Curve, at
from dtrain.sweep.space import Axis, Choices

ATTEMPTS = 20
"""How often a parent and its changes are drawn again, if another member has the same."""

Birth = Callable[[Mapping[str, Any], Job, int], Job]
"""(values, parent, step) -> the job with these values that begins with the parent's checkpoint of that step."""


def population(
    jobs: Sequence[Job],
    curves: Mapping[str, Curve],
    places: Sequence[int],
    *,
    factor: int,
    total: int,
    seed: int,
    space: Sequence[Axis],
    birth: Birth,
) -> list[tuple[Job, int]]:
    """Every job there has been, with the step that it may go to by now. After each rung, once all `total` are there,
    those that failed and the worst 1 / `factor` give way to jobs that begin with the checkpoint of one of the best 1 /
    `factor`.
    """
    living, goals = list(jobs), {job.name: (job, places[0]) for job in jobs}
    if len(living) < total:
        return list(goals.values())
    for rung, following in pairwise(places):
        losses = [at(curves[job.name], rung) for job in living]
        known = sorted((loss, number) for number, loss in enumerate(losses) if loss is not None)
        if len(known) < len(living):
            break
        few = max(1, len(known) // factor)
        best = [number for loss, number in known[:few] if loss < math.inf]
        if not best:
            break
        worst = [number for place, (loss, number) in enumerate(known) if place >= len(known) - few or loss == math.inf]
        parents = [living[number] for number in best]
        for number in sorted({*worst} - {*best}):
            chance = random.Random(f"{seed} {rung} {number}")
            for _ in range(ATTEMPTS):
                parent = chance.choice(parents)
                born = birth(explored(parent.values, space, chance), parent, rung)
                if born.name not in goals:
                    break
            living[number] = born
            goals[born.name] = born, following
        goals |= {job.name: (job, following) for job in living}
    return list(goals.values())


def explored(values: Mapping[str, Any], space: Sequence[Axis], chance: random.Random) -> dict[str, Any]:
    """The values of a parent, each moved up or down: to the next one of a list, or by a fifth in an interval."""
    axes = {axis.key: axis for axis in space}
    return {key: chance.choice(_neighbours(value, axes[key])) for key, value in values.items()}


def _neighbours(value: Any, axis: Axis) -> Sequence[Any]:
    """The values next to one; itself if there are none."""
    if isinstance(axis, Choices):
        numbers = all(isinstance(each, int | float) for each in axis.values)
        values = sorted(axis.values) if numbers else list(axis.values)
        place = values.index(value) if value in values else len(values) + 1  # of a space that was narrowed since
        return [values[near] for near in (place - 1, place + 1) if 0 <= near < len(values)] or [value]
    moved = (
        (math.floor(0.8 * value), math.ceil(1.2 * value)) if axis.whole else (_short(0.8 * value), _short(1.2 * value))
    )
    inside = [min(max(each, axis.low), axis.high) for each in moved]
    return [each for each in inside if each != value] or [value]


def _short(number: float) -> float:
    """Four digits of a number."""
    return float(f"{number:.4g}")
