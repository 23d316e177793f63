"""The journals of a run, shortened to what a page can draw: metrics.jsonl as means over equal parts of its steps, and
events.jsonl as evaluations and marks.

Rows may be missing, damaged, in any order and of any size: what is no finite number is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.config.structure import FINITE
from dtrain.errors import StoreError
from dtrain.report.runs import ENDED, rows
from dtrain.storage import store

WHOLE = 256 << 10
"""Most bytes of metrics.jsonl that are read whole, about 1,200 rows. Of a longer file, parts of PART bytes are read."""
PART = 4 << 10
LARGEST_STEP = 1 << 53
MOST_COLUMNS = 24
NOT_DRAWN = ("step", "seen")
MARKS = ("started", "restarted", "committed", "save_failed", "damaged", "spike", "caveat", "logger_failed", *ENDED)
"""Events that a page shows beside the curves."""


@dataclass(frozen=True)
class Curve:
    """One column of metrics.jsonl: mean, lowest and highest value of each part of the steps; None where no row is."""

    means: Sequence[float | None]
    lows: Sequence[float | None]
    highs: Sequence[float | None]


@dataclass(frozen=True)
class Metrics:
    """The steps from `first` to `last` in equal parts, as many as each curve has points."""

    first: int
    last: int
    curves: Mapping[str, Curve]

    def step(self, part: int, parts: int) -> float:
        """The step in the middle of a part."""
        return self.first + (part + 0.5) * (self.last - self.first + 1) / parts - 0.5


def metrics(url: str, *, points: int, parts: int, names: Iterable[str] | None = None) -> Metrics:
    """metrics.jsonl of the run at `url`, in at most `points` points. `parts`: of a long file that are read; `names`: of
    the columns, all if None.
    """
    table = {row["step"]: row for row in _rows(store.join(url, "metrics.jsonl"), parts) if _is_step(row.get("step"))}
    if not table:
        return Metrics(0, 0, {})
    first, last = min(table), max(table)
    points = min(points, last - first + 1)
    columns: dict[str, list[list[float]]] = {name: [[] for _ in range(points)] for name in names or ()}
    for step, row in table.items():
        for name, value in row.items():
            if name not in columns and names is None and len(columns) < MOST_COLUMNS and name not in NOT_DRAWN:
                columns[name] = [[] for _ in range(points)]
            if name in columns and FINITE.holds(value):
                columns[name][(step - first) * points // (last - first + 1)].append(value)
    return Metrics(first, last, {name: _curve(column) for name, column in columns.items() if any(column)})


def _curve(column: Sequence[Sequence[float]]) -> Curve:
    return Curve(
        [sum(part) / len(part) if part else None for part in column],
        [min(part, default=None) for part in column],
        [max(part, default=None) for part in column],
    )


def _rows(url: str, parts: int) -> Iterable[Mapping[str, Any]]:
    """The rows of a journal, or of `parts` of it; none if it cannot be read."""
    try:
        data = store.ending(url, WHOLE)
        if len(data) < WHOLE:
            return rows(data)
        size = store.size(url)
        begins = [part * (size - PART) // parts for part in range(parts)]
        return rows(b"\n".join([*store.parts(url, begins, PART), data[-PART:]]))
    except StoreError:
        return []


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST_STEP


def evaluations(events: Sequence[Mapping[str, Any]], *, points: int) -> dict[str, list[tuple[int, float]]]:
    """Held-out figure -> (step, value), at most `points` of them, always with the last."""
    table: dict[str, dict[int, float]] = {}
    for event in events:
        if event.get("event") == "evaluated" and _is_step(event.get("step")):
            for name, value in event.items():
                if name.startswith("eval_") and FINITE.holds(value) and (name in table or len(table) < MOST_COLUMNS):
                    table.setdefault(name, {})[event["step"]] = value
    return {name: _thinned(sorted(values.items()), points) for name, values in table.items()}


def _thinned(pairs: Sequence[tuple[int, float]], points: int) -> list[tuple[int, float]]:
    every = -(-len(pairs) // points)
    return list(reversed(pairs[::-1][:: max(1, every)]))


def clock(events: Iterable[Mapping[str, Any]], steps: Sequence[float]) -> list[float | None]:
    """The time, in seconds since 1970, at which each of the ascending `steps` was done, between the times that events
    tell. A start from an earlier step replaces what was done after it. None where no event tells.
    """
    anchors = list[tuple[float, float]]()
    for event in events:
        step: Any = event.get("step")
        time: Any = event.get("time")
        if not _is_step(step) or not FINITE.holds(time):
            continue
        while anchors and anchors[-1][0] > step:
            anchors.pop()
        if not anchors or time >= anchors[-1][1]:
            anchors.append((float(step), float(time)))
    return [_between(anchors, step) for step in steps]


def _between(anchors: Sequence[tuple[float, float]], step: float) -> float | None:
    """Linear between anchors, and beyond the last one by the pace before it."""
    if len(anchors) < 2 or step < anchors[0][0]:
        return None
    index = next((number for number, (there, _) in enumerate(anchors) if there >= step), len(anchors) - 1)
    (before, since), (after, until) = anchors[max(0, index - 1)], anchors[max(1, index)]
    if after == before:
        return until
    return since + (until - since) * (step - before) / (after - before)
