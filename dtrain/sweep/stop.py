"""The words `sweep.stop`, `.rung` and `.factor`: judged before the first job, and made into the proposer that stops
jobs early.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dtrain.config.sections import Sweep
from dtrain.planned import Plan
from dtrain.storage import attempts, store
from dtrain.sweep import rungs
from dtrain.sweep.folder import Job
from dtrain.sweep.history import Curves
from dtrain.sweep.population import Birth, population
from dtrain.sweep.proposer import Ended, Proposer
from dtrain.sweep.rungs import Curve
from dtrain.sweep.space import Axis
from dtrain.sweep.stopping import Stopping
from dtrain.sweep.study import Study

ALIKE = ("model", "data", "objective", "seed")
"""Fields of a plan that one job needs to go on from the checkpoint of another, beside its batch and optimizer."""
SHOWN = 4
"""Rungs that are named at the beginning."""
INDEPENDENT = ("grid", "random", "sobol")
"""Searches that draw without results."""


def mistakes(asked: Sweep, keys: Iterable[str]) -> Iterable[str]:
    """Mistakes in the settings, whatever the jobs are. `keys`: the words of the jobs."""
    stop, keys = f"sweep.stop={asked.stop}", set(keys)
    if asked.stop == "none":
        for key, value in ("rung", asked.rung), ("factor", asked.factor):
            if value != getattr(Sweep(), key):
                yield f"sweep.{key}={value}: nothing reads it. Type sweep.stop=halving, or leave it out."
        return
    for key in sorted({"stop_after", "resume"} & keys):
        yield f"{key}: with {stop} the sweep says where jobs stop and go on. Leave {key} out, or type sweep.stop=none."
    if asked.search == "nsga2":
        yield f"{stop}: it compares jobs by one metric, and sweep.search=nsga2 has two. Type sweep.search=tpe."
    elif asked.stop == "population" and asked.search not in INDEPENDENT:
        yield f"{stop}: it changes the words itself, as sweep.search={asked.search} would. Type sweep.search=random."


def first_rung(asked: Sweep, plan: Plan, jobs: int) -> tuple[int, Sequence[str]]:
    """The steps of the first rung, and what is wrong with it. `plan`: of the first job; `jobs`: how many there are."""
    if asked.stop == "none":
        return 0, ()
    stop, steps = f"sweep.stop={asked.stop}", plan.steps
    fewest = rungs.FEWEST + 1 if asked.stop == "median" else asked.factor
    if jobs < fewest and asked.rung == "auto":
        return 0, [f"{stop}: it compares {fewest} jobs or more, not {jobs}. Type more values, or sweep.stop=none."]
    auto = rungs.first_rung(asked.stop, steps=steps, jobs=jobs, factor=asked.factor)
    rung = auto if asked.rung == "auto" else asked.rung
    if 0 < rung < steps:
        return rung, ()
    if 0 < auto < steps:
        return 0, [f"sweep.rung={rung}: jobs end at steps={steps}. Type sweep.rung={auto}, or more steps."]
    return 0, [f"{stop}: steps={steps} leaves no room for a rung. Type steps={10 * asked.factor}, or sweep.stop=none."]


def differences(asked: Sweep, first: Plan, plan: Plan) -> Iterable[str]:
    """Why the jobs of two plans cannot be compared, or one cannot go on from the checkpoint of the other."""
    if asked.stop == "none":
        return
    stop = f"sweep.stop={asked.stop}"
    if plan.steps != first.steps:
        yield (
            f"{stop}: jobs are compared after the same steps, and some have steps={first.steps}, others {plan.steps}. "
            "Type steps=<one number>."
        )
    if asked.stop != "population":
        return
    mine, its = _needs(plan), _needs(first)
    for key in (key for key in mine if mine[key] != its[key]):
        yield (
            f"{stop}: a job cannot go on from the checkpoint of one with another {key}. Sweep words like optim.lr, or "
            "type sweep.stop=halving."
        )


def _needs(plan: Plan) -> Mapping[str, str]:
    parts: dict[str, Any] = {key: getattr(plan, key) for key in ALIKE}
    parts |= {"batch": plan.batch.size, "optim": plan.optim.get("_target_")}
    return {key: json.dumps(value, sort_keys=True, default=str) for key, value in parts.items()}


def in_order(jobs: Sequence[Job], study: Study) -> list[Job]:
    """The jobs of a grid in the order in which they are compared: for the median, which compares with the jobs before,
    by their digests, as any order that somebody typed would rank them.
    """
    return sorted(jobs, key=lambda job: job.digest) if study.stop == "median" else [*jobs]


def sentence(study: Study, steps: int) -> str:
    """How jobs stop early."""
    places = rungs.rungs(study.stop, steps=steps, rung=study.rung, factor=study.factor)
    shown = [f"{place:,}" for place in places[:-1]]
    at = ", ".join([*shown[:SHOWN], *(["..."] if len(shown) > SHOWN else [])])
    what = {
        "halving": f"one job in {study.factor}, the best, goes on",
        "median": "jobs no worse than the median of earlier ones go on",
        "population": f"one job in {study.factor}, the worst, takes the checkpoint of one of the best",
    }
    return f"{study.stop} at {at} of {steps:,} steps: {what[study.stop]}"


def proposer(
    root: str, study: Study, steps: int, source: Proposer, total: int, space: Sequence[Axis], birth: Birth
) -> Stopping:
    """The jobs of `source`, of which there will be `total`, stopped as `study` says. `steps`: of a whole run."""
    places = rungs.rungs(study.stop, steps=steps, rung=study.rung, factor=study.factor)
    born = dict[tuple[str, str, int], Job]()
    is_population = study.stop == "population"  # the weights at a rung go on, not the best before it

    def birth_once(values: Mapping[str, Any], parent: Job, step: int) -> Job:
        key = json.dumps(values, default=str), parent.name, step
        if key not in born:
            born[key] = birth(values, parent, step)
        return born[key]

    def rule(jobs: Sequence[Job], curves: Mapping[str, Curve], count: int) -> Sequence[tuple[Job, int]]:
        if is_population:
            return population(
                jobs, curves, places, factor=study.factor, total=count, seed=study.seed, space=space, birth=birth_once
            )
        names = [job.name for job in jobs]
        if study.stop == "median":
            goals = rungs.median(names, curves, places)
        else:
            goals = rungs.halving(names, curves, places, factor=study.factor, total=count)
        return [(job, goals[job.name]) for job in jobs]

    def loss(ended: Ended) -> float:
        return study.losses((is_population and ended.last) or ended.metrics, ended.loss)[0]

    def told(loss: float) -> Ended:
        value = math.nan if loss == math.inf else loss
        return Ended("finished", metrics={study.metrics[0]: -value if study.goals[0] == "max" else value})

    def is_saved(name: str) -> bool:
        return any(one.is_committed for one in attempts.listed(store.join(root, name)))

    curves = Curves(root, lambda figures, loss: study.losses(figures, loss)[0], best=not is_population)
    curves.read(store.folders(root))
    return Stopping(source, rule, places, curves, total=total, loss=loss, told=told, is_saved=is_saved)
