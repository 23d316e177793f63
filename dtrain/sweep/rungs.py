"""Where the jobs of a sweep are compared before they end, and which of them go on: halving and the median rule.

A rung is a number of steps after which a job stops, saves and evaluates. What the rules decide depends on the losses at
the rungs and on the order of the jobs, never on which job was quick: any worker decides the same, at any time.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

Curve = Mapping[int, float]
"""Steps -> the loss there, which is the smaller the better; infinity: the job failed on the way."""
MOST_ROUNDS = 2
"""How often halving compares, if `sweep.rung` does not say."""
GENERATIONS = 10
"""Rungs of the other rules, if `sweep.rung` does not say."""
FEWEST = 4
"""Earlier jobs that the median rule wants."""


def first_rung(rule: str, *, steps: int, jobs: int, factor: int) -> int:
    """The steps of the first rung; 0 if there are too few steps or jobs for one."""
    if rule != "halving":
        return steps // min(GENERATIONS, steps)
    rounds = 0
    while rounds < MOST_ROUNDS and factor ** (rounds + 1) <= min(jobs, steps):
        rounds += 1
    return math.ceil(steps / factor**rounds) if rounds else 0


def rungs(rule: str, *, steps: int, rung: int, factor: int) -> tuple[int, ...]:
    """The steps of every rung, the last of which is the end of the run: each is `factor` times the one before it with
    halving, and otherwise they are `rung` steps apart.
    """
    places = list[int]()
    while rung < steps:
        places.append(rung)
        rung = rung * factor if rule == "halving" else rung + places[0]
    return (*places, steps)


def at(curve: Curve, step: int) -> float | None:
    """The loss at a rung; of a job that never stopped there, the next one it has. Infinity: it failed before. None: it
    has not come so far.
    """
    if step in curve:
        return curve[step]
    later = [place for place in curve if place > step]
    if later:
        return curve[min(later)]
    return math.inf if math.inf in curve.values() else None


def halving(
    names: Sequence[str], curves: Mapping[str, Curve], places: Sequence[int], *, factor: int, total: int
) -> dict[str, int]:
    """The step that each job may go to by now: of those at a rung the best 1 / `factor` go on, as soon as it is certain
    that they are among these. `total`: jobs there will be; `places`: the rungs.

    Successive halving (https://arxiv.org/abs/1502.07943) without its barrier: as in ASHA
    (https://arxiv.org/abs/1810.05934) a job goes on while others are still on their way, but only one that none of them
    can displace, so that no job goes on for having been quick.
    """
    goals, members, count = dict.fromkeys(names, places[0]), list(names), total
    for rung, following in pairwise(places):
        losses = {name: loss for name in members if (loss := at(curves[name], rung)) is not None}
        pending, room = count - len(losses), max(1, count // factor)
        best = sorted(losses, key=losses.__getitem__)[: max(0, room - pending)]
        members = [name for name in losses if name in best and losses[name] < math.inf]
        goals |= dict.fromkeys(members, following if room > 1 else places[-1])
        count = room if pending else len(members)
        if room == 1:  # the last one need not be compared any more
            break
    return goals


def median(names: Sequence[str], curves: Mapping[str, Curve], places: Sequence[int]) -> dict[str, int]:
    """The step that each job may go to by now: one stops at a rung if its best loss so far is worse than the median of
    the mean losses up to there of the jobs before it in the order, once these are there.

    The rule of Google Vizier (https://dl.acm.org/doi/10.1145/3097983.3098043), which compares with all jobs that have
    come so far.
    """
    goals = dict.fromkeys(names, places[0])
    going = list(names)
    for number, (rung, following) in enumerate(pairwise(places)):
        means, on = list[float](), list[str]()
        for name in going:
            loss = at(curves[name], rung)
            if loss is None:  # those after it wait for it
                break
            so_far = [each for place in places[: number + 1] if (each := at(curves[name], place)) is not None]
            is_worse = len(means) >= FEWEST and min(so_far) > _middle(means)
            if loss < math.inf:
                bisect.insort(means, fmean(so_far))
                if not is_worse:
                    on.append(name)
                    goals[name] = following
        going = on
    return goals


def _middle(ordered: Sequence[float]) -> float:
    """The median of an ascending list."""
    half = len(ordered) // 2
    return fmean(ordered[half - 1 + len(ordered) % 2 : half + 1])
