"""The data of a sweep's page: its jobs with their words, figures and curves, what mattered, and why jobs failed.

Any folder of runs makes such a page. A sweep adds which keys are swept, how many jobs it has, and its command.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dtrain import __version__
from dtrain.config.word import slug
from dtrain.report import facts, importance, runs
from dtrain.report.curves import Metrics, evaluations, metrics
from dtrain.report.facts import shown, shown_value
from dtrain.report.of_run import seconds
from dtrain.report.runs import Run
from dtrain.secrets import screen

POINTS, HELD_OUT, OF_ALL = 100, 40, 160_000
"""Most points of a job's loss, and of its held-out figure; and of the losses of all jobs together."""
PARTS = 64
"""Parts of a long metrics.jsonl that are read."""
MOST_KEYS, MOST_FIGURES = 24, 12
LOSS = "loss"
"""The figure of jobs without held-out data: the loss of their last step."""


@dataclass(frozen=True)
class Sweep:
    """A sweep as its sweep.yaml has it. `swept`: key -> its values as text, empty for an interval; `jobs`: how many,
    None if unknown; `goals`: figure that it compares -> lowest or highest; `command`: that goes on with it.
    """

    swept: Mapping[str, Sequence[str]] = field(default_factory=dict)
    jobs: int | None = None
    goals: Mapping[str, str] = field(default_factory=dict)
    command: str = ""


@dataclass(frozen=True)
class Job:
    """A run of the sweep. `words`: dotted key -> value as text; `curve`: its training loss; `seconds`: of wall time."""

    run: Run
    words: Mapping[str, str]
    curve: Metrics
    held_out: Mapping[str, Sequence[tuple[int, float]]]
    seconds: float | None
    cause: str
    trace: str

    @property
    def status(self) -> str:
        return facts.STATUS.get(self.run.status, "failed" if self.cause else "new")

    @property
    def figures(self) -> Mapping[str, float]:
        curve = self.curve.curves.get(LOSS)
        last = next((value for value in reversed(curve.means) if value is not None), None) if curve else None
        return {**self.run.compared, **({} if last is None else {LOSS: last})}


def read(url: str, sweep: Sweep) -> list[Job]:
    """The jobs at a URL, oldest first. Raises StoreError if there is no such folder."""

    def job(run: Run, tail: bytes) -> Job:
        events = list(runs.rows(tail))
        cause, trace = facts.cause(run, events)
        return Job(
            run=run,
            words={**_recipe(run.name, sweep), **run.words},
            curve=metrics(run.url, points=POINTS, parts=PARTS, names=(LOSS,)),
            held_out=evaluations(events, points=HELD_OUT),
            seconds=seconds(events),
            cause=cause,
            trace=trace,
        )

    jobs = runs.each(url, job)
    return sorted(jobs, key=lambda job: (job.run.began or math.inf, job.run.name))


def _recipe(name: str, sweep: Sweep) -> dict[str, str]:
    """The word `recipe` of a job, where it is swept: the name of its folder alone tells it."""
    choices = [text for text in sweep.swept.get("recipe", ()) if slug([f"recipe-{text}"]) in name]
    return {"recipe": max(choices, key=len)} if choices else {}


def data(url: str, jobs: Sequence[Job], sweep: Sweep) -> dict[str, Any]:
    figures = _figures(jobs, sweep)
    keys = _keys(jobs, sweep)
    columns = {key: _column(key, [job.words.get(key) for job in jobs]) for key in keys}
    points = max(8, min(POINTS, OF_ALL // max(1, len(jobs))))
    best = _best(jobs, figures)
    plan = facts.plan(best.run.url) if best else []
    return {
        "kind": "sweep", "name": shown(url.rstrip("/").rpartition("/")[2]), "place": shown(url), "made": time.time(),
        "version": __version__, "asked": sweep.jobs,
        "figures": [{"name": shown(name), "best": which} for name, which in figures.items()],
        "keys": [shown(key) for key in keys],
        "values": list(columns.values()),
        "jobs": [
            {
                "name": shown(job.run.name), "status": job.status, "state": job.run.status, "step": job.run.step,
                "seconds": None if job.seconds is None else round(job.seconds, 2),
                "figures": [_short(job.figures.get(name)) for name in figures],
                "loss": _curve(job.curve, points),
                "heldout": {
                    shown(name): [[step for step, _ in pairs], [_short(value) for _, value in pairs]]
                    for name, pairs in job.held_out.items() if name in figures
                },
            }
            for job in jobs
        ],
        "shares": [
            [[keys.index(key), round(share, 4)] for key, share in shares.items()]
            for shares in (importance.shares(columns, _judged(jobs, *each)) for each in figures.items())
        ],
        "causes": _causes(jobs),
        "words": [[shown(key), shown_value(key, text)] for key, text in _shared(jobs, keys).items()],
        "commands": _commands(url, sweep, any(job.status == "failed" for job in jobs)),
        "plan": plan, "machine": facts.machine(best.run.url, facts.events(best.run.url), plan) if best else [],
    }  # fmt: skip


def _figures(jobs: Sequence[Job], sweep: Sweep) -> dict[str, str]:
    """Figure -> lowest or highest; first the one that the sweep compares."""
    known = {LOSS: "lowest", **runs.directions([job.run for job in jobs]), **sweep.goals}
    names = dict.fromkeys(name for job in jobs for name in job.figures)
    first = [name for name in (*sweep.goals, "eval_loss", *known) if name in names and name != LOSS]
    order = dict.fromkeys([*(LOSS for name in sweep.goals if name == LOSS), *first, *names])
    return {name: known.get(name, "lowest") for name in [*order][:MOST_FIGURES]}


def _keys(jobs: Sequence[Job], sweep: Sweep) -> list[str]:
    """The swept keys, then others whose values differ."""
    shared = _shared(jobs, ())
    changed = dict.fromkeys(key for job in jobs for key in job.words if key not in job.run.at_default)
    differ = [key for key in changed if key not in shared]
    swept = [key for key in sweep.swept if any(key in job.words for job in jobs)]
    return (swept or differ)[:MOST_KEYS]


def _shared(jobs: Sequence[Job], keys: Iterable[str]) -> dict[str, str]:
    """The words that all jobs share, without `keys`."""
    shared = dict(jobs[0].words) if jobs else {}
    for job in jobs:
        shared = {key: text for key, text in shared.items() if job.words.get(key) == text}
    return {key: text for key, text in shared.items() if key not in keys}


def _column(key: str, texts: Sequence[str | None]) -> list[Any]:
    """The values of a key: numbers if all are, else texts."""
    try:
        numbers = [None if text is None else float(text) for text in texts]
        if all(number is None or math.isfinite(number) for number in numbers):
            return numbers
    except ValueError:
        pass
    return [None if text is None else shown_value(key, text) for text in texts]


def _judged(jobs: Sequence[Job], name: str, which: str) -> list[float | None]:
    """A figure of each job; a job that spiked has the worst, one without the figure none."""
    worst = math.inf if which == "lowest" else -math.inf
    return [worst if job.run.status == "spiked" else job.figures.get(name) for job in jobs]


def _best(jobs: Sequence[Job], figures: Mapping[str, str]) -> Job | None:
    """Of equal jobs the first by name."""
    for name, which in figures.items():
        if having := sorted((job for job in jobs if name in job.figures), key=lambda job: job.run.name):
            return (max if which == "highest" else min)(having, key=lambda job: job.figures[name])
    return jobs[0] if jobs else None


def _causes(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The causes of failures, the most frequent first, each with the numbers of its jobs and one traceback."""
    causes: dict[str, list[int]] = {}
    for number, job in enumerate(jobs):
        if job.status == "failed":
            causes.setdefault(facts.alike(job.cause), []).append(number)
    return [
        {"text": jobs[numbers[0]].cause, "trace": next((jobs[n].trace for n in numbers if jobs[n].trace), ""),
         "jobs": numbers}
        for _, numbers in sorted(causes.items(), key=lambda pair: -len(pair[1]))
    ]  # fmt: skip


def _commands(url: str, sweep: Sweep, failed: bool) -> list[tuple[str, str]]:
    """Commands about the sweep, each with its purpose."""
    place = screen.typed(url)
    rows = [("go on: run what is missing", sweep.command)] if sweep.command else []
    rows += [("take part from another host", f"python -m dtrain sweep work {place}")] if sweep.command else []
    rows += [("list its jobs", f"python -m dtrain runs {place}")]
    rows += [("why jobs failed", f"python -m dtrain sweep why {place}")] if failed and sweep.command else []
    return rows


def _curve(table: Metrics, points: int) -> list[Any]:
    """First step, last step, and the means of equal parts of the steps between."""
    curve = table.curves.get(LOSS)
    if curve is None:
        return []
    count, points = len(curve.means), min(points, len(curve.means))
    bounds = [part * count // points for part in range(points + 1)]
    parts = [[value for value in curve.means[a:b] if value is not None] for a, b in pairwise(bounds)]
    return [table.first, table.last, [_short(sum(part) / len(part)) if part else None for part in parts]]


def _short(value: float | None) -> float | None:
    return None if value is None else json.loads(f"{value:.5g}")
