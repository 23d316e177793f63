"""The data of a run's page: its metrics and events over steps and time, its words, plan, machine, and how it ended."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dtrain import __version__
from dtrain.config.structure import FINITE
from dtrain.predict import price
from dtrain.report import facts
from dtrain.report.curves import MARKS, clock, evaluations, metrics
from dtrain.report.facts import shown, shown_value
from dtrain.report.runs import Run
from dtrain.result import OF_THE_MACHINE
from dtrain.secrets import screen

POINTS, PARTS = 1000, 512
"""Points of a curve; parts of a long metrics.jsonl that are read."""
MOST_MARKS = 500
DETAILS = {
    "reason": "", "error": "", "text": "", "why": "", "answer": "on_spike=", "logger": "logger ", "ranks": "ranks: ",
    "seconds": "seconds: ", "stall_seconds": "seconds that training waited: ",
}  # fmt: skip
"""Facts of an event that its mark shows -> the words before each."""


def data(run: Run) -> dict[str, Any]:
    events = facts.events(run.url)
    table = metrics(run.url, points=POINTS, parts=PARTS)
    points = max((len(curve.means) for curve in table.curves.values()), default=0)
    times = clock(events, [table.step(part, points) for part in range(points)])
    origin = min((event["time"] for event in events if FINITE.holds(event.get("time"))), default=0.0)
    held_out = evaluations(events, points=POINTS)
    cause, trace = facts.cause(run, events)
    plan = facts.plan(run.url)
    return {
        "kind": "run", "name": shown(run.url.rstrip("/").rpartition("/")[2]), "place": shown(run.url),
        "made": time.time(), "version": __version__, "status": run.status, "step": run.step,
        "steps": dict(plan).get("steps"), "seconds": seconds(events), "began": run.began,
        "figures": run.figures, "best": {shown(name): [*pair] for name, pair in run.best.items()},
        "cause": cause, "trace": trace,
        "first": table.first, "last": table.last, "origin": origin,
        "times": [None if moment is None else round(moment - origin, 3) for moment in times],
        "columns": [
            {"name": shown(name), "group": _group(name, held_out), "means": _rounded(curve.means),
             "lows": _rounded(curve.lows), "highs": _rounded(curve.highs)}
            for name, curve in table.curves.items()
        ],
        "heldout": {shown(name): [list(pair) for pair in zip(*pairs, strict=True)] for name, pairs in held_out.items()},
        "marks": _marks(events),
        "words": [[shown(key), shown_value(key, text)] for key, text in run.words.items()],
        "commands": commands(run.url), "plan": plan,
        "machine": [*facts.machine(run.url, events, plan), *_price(dict(plan), seconds(events))],
    }  # fmt: skip


def commands(url: str) -> list[tuple[str, str]]:
    """Commands about a run, each with its purpose."""
    again = screen.typed(f"recipe={url}/config.yaml")
    return [
        ("run it again", f"python -m dtrain {again} out='<another place>'"),
        ("compare it", f"python -m dtrain diff {screen.typed(url)} '<another run>'"),
        ("its checkpoints", f"python -m dtrain checkpoint ls {screen.typed(f'out={url}')}"),
    ]


def seconds(events: Sequence[Mapping[str, Any]]) -> float | None:
    """The wall time of a run, without the time between its starts: what its newest end tells, and from the first event
    of each later start to its last.
    """
    total, times = 0.0, list[float]()
    for event in events:
        if not FINITE.holds(event.get("time")):
            continue
        if event.get("event") == "built" and times:
            total, times = total + times[-1] - times[0], []
        times.append(event["time"])
        if FINITE.holds(event.get("wall_seconds")):
            total, times = event["wall_seconds"], times[-1:]
    return total + max(times) - min(times) if times else None


def _price(plan: Mapping[str, str], seconds: float | None) -> Iterator[tuple[str, str]]:
    """Price of the run so far, where its plan has one of an hour."""
    with suppress(KeyError, ValueError, OverflowError):
        cluster = {"price": float(plan["cluster.price"]), "gpus": int(plan["cluster.gpus"])}
        nodes = int(plan["nodes"])
        spent = price.cost(seconds or 0.0, cluster, world=nodes * int(plan["devices"]), nodes=nodes)
        yield "price", price.amount(spent or 0.0)


def _group(name: str, held_out: Iterable[str]) -> str:
    """The chart of a column."""
    if name == "loss" or f"eval_{name}" in held_out:
        return name
    if name in OF_THE_MACHINE:
        return "memory" if name == "peak_bytes" else "speed"
    return "rate" if name == "lr" or name.startswith("lr_") else name


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in values]


def _brief(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _marks(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The events that a page lists, the newest MOST_MARKS of them. One without a step is at the step before it."""
    marks, step = list[dict[str, Any]](), 0.0
    for event in events:
        step = event["step"] if FINITE.holds(event.get("step")) else step
        if event.get("event") in MARKS:
            details = shown(
                ", ".join(f"{begin}{_brief(event[name])}" for name, begin in DETAILS.items() if event.get(name))
            )
            moment = event["time"] if FINITE.holds(event.get("time")) else None
            marks.append({"kind": event["event"], "step": step, "time": moment, "text": details})
    return marks[-MOST_MARKS:]
