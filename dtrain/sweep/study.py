"""The aim of a sweep and its way there: the words `sweep.search`, `.trials`, `.metric`, `.goal`, `.begin` and `.seed`,
decided before the first job and kept in sweep.yaml.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from dtrain.config.schema import Config
from dtrain.config.sections import Sweep
from dtrain.config.structure import COUNT, MAPPING, TEXT, Each, Optional
from dtrain.config.word import cut, spelling
from dtrain.errors import WordsError, nearest
from dtrain.planned import Plan
from dtrain.resolve.declared import states_figures
from dtrain.resolve.sets import is_of_a_set, measured_on
from dtrain.secrets import screen
from dtrain.sweep import space
from dtrain.sweep.space import Axis, Choices, Interval

NEEDS = {"tpe": "optuna", "cmaes": "cmaes"}
"""Search -> the package that it is written with."""
GOALS = ("min", "max")
SOBOL_KEYS = 21
"""The most keys of a Sobol sequence here: rows of the table in dtrain/sweep/sobol.py."""
KEYS = tuple(
    f"sweep.{name}" for name in ("search", "trials", "metric", "goal", "begin", "seed", "stop", "rung", "factor")
)
"""Settings that stand in sweep.yaml, so that all workers have the same."""
SHAPE = {
    "method": TEXT,
    "seed": COUNT,
    "trials": Optional(COUNT),
    "metrics": Each(TEXT),
    "goals": Each(TEXT),
    "begin": Each(MAPPING),
    "ahead": COUNT,
    "stop": TEXT,
    "rung": COUNT,
    "factor": COUNT,
}


def wrong(document: Mapping[str, Any] | None) -> str:
    """The mistake in the study of a file that has the SHAPE; empty if there is none."""
    if document is None:
        return ""
    metrics, goals, method = document["metrics"], document["goals"], document["method"]
    if len(metrics) != len(goals) or not set(goals) <= set(GOALS):
        return "study does not say min or max for each of its metrics"
    compares = method != "grid" or document["stop"] != "none"
    return f"study has {len(metrics)} metrics" if compares and len(metrics) != (1 + (method == "nsga2")) else ""


@dataclass(frozen=True)
class Study:
    """`metrics`: the figures to improve; `goals`: min or max, of each; `begin`: values to try first; `ahead`: a trial
    is drawn from the results of those that are so many numbers before it or more. So its values do not depend on which
    job was quick. `stop`, `rung`, `factor`: dtrain/sweep/stop.py.
    """

    method: str = "grid"
    seed: int = 0
    trials: int | None = None
    metrics: tuple[str, ...] = ()
    goals: tuple[str, ...] = ()
    begin: tuple[Mapping[str, Any], ...] = ()
    ahead: int = 2
    stop: str = "none"
    rung: int = 0
    factor: int = 3

    @property
    def is_search(self) -> bool:
        return self.method != "grid"

    def words(self) -> dict[str, str]:
        """Key -> text, of the settings that make two searches different ones."""
        metric, goal, begin = (spelling(list(each)) for each in (self.metrics, self.goals, self.begin))
        words = {"sweep.search": self.method, "sweep.seed": str(self.seed), "sweep.begin": begin}
        return words | ({"sweep.metric": metric, "sweep.goal": goal} if self.metrics else {})

    def stop_words(self) -> dict[str, str]:
        """Key -> text, of the settings that stop jobs early."""
        if self.stop == "none":
            return {}
        return {"sweep.stop": self.stop, "sweep.rung": str(self.rung), "sweep.factor": str(self.factor)}

    def settings(self) -> dict[str, str]:
        """Key -> text, of all settings that stand in sweep.yaml."""
        return {**self.words(), **self.stop_words(), "sweep.trials": spelling(self.trials)}

    def document(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_document(cls, data: Mapping[str, Any]) -> "Study":
        """`data` has the SHAPE."""
        lists = {name: tuple(data[name]) for name in ("metrics", "goals", "begin")}
        return cls(**{**{name: data[name] for name in SHAPE}, **lists})

    def losses(
        self, figures: Mapping[str, float], loss: float | None, last: Mapping[str, float] | None = None
    ) -> tuple[float, ...]:
        """The numbers that a search makes small: the metrics of a finished job, negative where the goal is max. One
        that is missing or NaN is the worst: infinity. `last`: those of its last step, which count where there are two
        metrics, as their best values may be of two steps.
        """
        figures = last if last and len(self.metrics) > 1 else figures
        values = [value_of(name, figures, loss) for name in self.metrics]
        signed = [-value if goal == "max" else value for value, goal in zip(values, self.goals, strict=True)]
        return tuple(math.inf if math.isnan(value) else value for value in signed)

    def worst(self) -> tuple[float, ...]:
        """The losses of a job that failed."""
        return (math.inf,) * len(self.metrics)


def value_of(metric: str, figures: Mapping[str, float], loss: float | None) -> float:
    """A metric of a finished job, NaN if it has none. The loss of the last batch stands for `eval_loss` where nothing
    is held out.
    """
    value = figures.get(metric, loss if metric in ("loss", "eval_loss") else None)
    return math.nan if value is None else float(value)


def mistakes(asked: Sweep, axes: Sequence[Axis]) -> Iterable[str]:
    """Mistakes in the settings of a sweep over these axes, whatever its jobs are."""
    yield from _of_method(asked, axes)
    yield from _of_begin(asked, axes)


def decide(asked: Sweep, config: Config, plan: Plan, slots: int) -> Study:
    """The study that the settings of a sweep ask for. `config` and `plan`: of its first job; `slots`: jobs at a time.
    Raises WordsError with every mistake in its metrics.
    """
    problems = list[str]()
    metrics = list(dict.fromkeys(map(str, _listed(asked.metric)))) or [_default_metric(config)]
    wanted = 2 if asked.search == "nsga2" else 1
    if len(metrics) != wanted:
        other = "sweep.search=nsga2" if wanted == 1 else "sweep.search=tpe"
        names = "sweep.metric=[eval_loss,eval_accuracy]" if wanted == 2 else f"sweep.metric={metrics[0]}"
        problems.append(
            f"sweep.metric: sweep.search={asked.search} has {wanted} of them, not {len(metrics)}. Type "
            f"{screen.typed(names)}, or {other}."
        )
    goals = list(_of_metrics(metrics, _listed(asked.goal), config, plan, problems))
    if problems:
        raise WordsError(*problems)
    begin = tuple(asked.begin) if asked.search != "grid" else ()
    return Study(
        method=asked.search,
        seed=asked.seed,
        trials=asked.trials,
        metrics=tuple(metrics),
        goals=tuple(goals),
        begin=begin,
        ahead=2 * slots,
    )


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    return [] if value is None else [value]


def _of_method(asked: Sweep, axes: Sequence[Axis]) -> Iterable[str]:
    """Mistakes in the choice of the search, the number of its trials, and the space that it gets."""
    search, size, intervals = asked.search, space.size(axes), [axis for axis in axes if isinstance(axis, Interval)]
    if search == "grid":
        if intervals:
            yield (
                f"{intervals[0].key}: an interval has no end of values, and a grid tries all. Type sweep.search=tpe "
                f"sweep.trials=50, or the values: {intervals[0].key}=<one>,<another>."
            )
        elif min(size, asked.trials or size) > space.MOST:
            yield (
                f"-m: {size:,.0f} jobs, and a grid has at most {space.MOST:,}. Type sweep.search=random "
                "sweep.trials=100 for some of them, or fewer values."
            )
        return
    if asked.trials is None:
        yield f"sweep.search={search}: it does not say how many jobs. Type sweep.trials=100."
    elif asked.trials > size:
        yield (
            f"sweep.trials={asked.trials}: the space has {size:,.0f} jobs. Type sweep.trials={size:.0f}, or "
            "sweep.search=grid."
        )
    if search == "cmaes" and len(intervals) < 2:
        yield (
            f"sweep.search=cmaes: it moves through two intervals or more, not {len(intervals)}. Type sweep.search=tpe."
        )
    if search == "sobol" and len(axes) > SOBOL_KEYS:
        yield (f"sweep.search=sobol: it takes at most {SOBOL_KEYS} keys, not {len(axes)}. Type sweep.search=random.")
    if search in NEEDS and find_spec(NEEDS[search]) is None:
        yield f"sweep.search={search}: {NEEDS[search]} is not installed. Type pip install 'dtrain[optuna]'."


def _of_begin(asked: Sweep, axes: Sequence[Axis]) -> Iterable[str]:
    known = {axis.key: axis for axis in axes}
    if asked.begin and asked.search == "grid":
        yield "sweep.begin: a grid tries all values. Type sweep.search=tpe too, or leave sweep.begin out."
        return
    for point in asked.begin:
        for key, value in point.items():
            if key not in known:
                yield f"sweep.begin: {cut(key)} is not swept.{nearest(key, known)}"
            elif not holds(known[key], value):
                yield f"sweep.begin: {cut(f'{key}={spelling(value)}')} is not in the space, {spell(known[key])}."


def holds(axis: Axis, value: Any) -> bool:
    """Whether a value is one of the axis."""
    if isinstance(axis, Choices):
        return any(value == each and type(value) is type(each) for each in axis.values)
    kinds = (int,) if axis.whole else (int, float)
    return type(value) in kinds and axis.low <= value <= axis.high


def spell(axis: Axis) -> str:
    """The axis as a word."""
    if isinstance(axis, Choices):
        return f"{axis.key}={cut(','.join(map(spelling, axis.values)))}"
    return f"{axis.key}={axis.text()}"


def _default_metric(config: Config) -> str:
    best, held_out = config.checkpoint.get("best") or config.stop.metric, _is_held_out(config)
    return str(best or ("loss" if held_out is False else "eval_loss"))


def _is_held_out(config: Config) -> bool | None:
    """Whether a part of the data is held out; None if its source does not say."""
    kept = [value for name, value in config.data.items() if name.startswith("holdout")]
    return any(kept) if kept else None


def _of_metrics(
    metrics: Sequence[str], goals: Sequence[str], config: Config, plan: Plan, problems: list[str]
) -> Iterable[str]:
    """min or max of each metric, as the objective and the hooks state it, or as asked."""
    typed = {
        plan.stop.get("metric"): plan.stop.get("is_best"),
        plan.checkpoint.get("best"): plan.checkpoint.get("best_is"),
    }
    stated = {"loss": "lowest", **{name: which for name, which in typed.items() if name}, **plan.decided()["figures"]}
    if config.ema:
        stated |= {name.replace("eval_", "eval_ema_", 1): which for name, which in stated.items() if name != "loss"}
    sets = config.evaluate.sets
    all_known = all(states_figures(part) for part in (config.objective, *config.hook.values()))
    if wrong := [goal for goal in goals if goal not in GOALS]:
        problems.append(f"sweep.goal={cut(str(wrong[0]))}: allowed: min, max. Type sweep.goal=min.")
    elif goals and len(goals) != len(metrics):
        problems.append(f"sweep.goal: {len(goals)} for {len(metrics)} metrics. Type one for each, or leave it out.")
    for number, metric in enumerate(metrics):
        goal = goals[number] if len(goals) == len(metrics) else None
        known = {"lowest": "min", "highest": "max"}.get(str(stated.get(metric)))
        if known is None and all_known:
            problems.append(f"sweep.metric={cut(metric)}: no job writes this figure.{nearest(metric, stated)}")
        elif metric.startswith("eval_") and _is_held_out(config) is False and not is_of_a_set(metric, sets):
            words = measured_on("sweep.metric", metric, sets, config.data)
            problems.append(
                f"sweep.metric={cut(metric)}: nothing is held out to measure it on. Type {words}, or sweep.metric=loss."
            )
        elif known is None and goal is None:
            problems.append(
                f"sweep.metric={cut(metric)}: neither the objective nor a hook says whether its lowest or highest "
                "value is the best. Type sweep.goal=min or max."
            )
        elif known and goal in GOALS and goal != known:
            problems.append(f"sweep.goal={goal}: the best {metric} is the {stated[metric]}. Leave sweep.goal out.")
        yield known or goal or "min"
