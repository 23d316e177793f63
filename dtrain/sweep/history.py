"""The losses of jobs at the rungs where they stopped, read off their events.jsonl: result.json has those of the last
stop alone.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dtrain.config.structure import fault
from dtrain.errors import StoreError
from dtrain.result import SHAPE
from dtrain.storage import store

LARGEST = 1 << 24
"""The most bytes that are read of a journal, at its end."""
STREAMS = 32
"""Journals that are read at a time, elsewhere."""
EVALUATED, ENDED = "evaluated", ("stopped", "finished")
"""The events that tell of figures, and those after which a checkpoint is there."""
WANTED = tuple(f'"event": "{name}"'.encode() for name in (EVALUATED, *ENDED))

BEST = SHAPE["best?"]

Loss = Callable[[Mapping[str, float], float | None], float]
"""(figures, loss of the last batch) -> what the sweep makes small; infinity instead of NaN."""


class Curves(dict[str, dict[int, float]]):
    """The name of a job -> the steps at which it stopped or finished -> its loss there; with `best`, its best so far
    where that is asked. What is not there is read when it is asked for. Raises StoreError.
    """

    def __init__(self, root: str, loss: Loss, *, best: bool = False) -> None:
        super().__init__()
        self._root, self._loss, self._best = root, loss, best

    def read(self, names: Sequence[str]) -> None:
        """Read several, elsewhere at the same time."""
        if store.is_local(self._root):
            self.update(zip(names, map(self._of, names), strict=True))
            return
        with ThreadPoolExecutor(STREAMS) as pool:
            self.update(zip(names, pool.map(self._of, names), strict=True))

    def __missing__(self, name: str) -> dict[int, float]:
        self[name] = self._of(name)
        return self[name]

    def _of(self, name: str) -> dict[int, float]:
        figures, curve = dict[int, dict[str, float]](), dict[int, float]()
        for event in _events(store.join(self._root, name, "events.jsonl")):
            step, seen = event.get("step"), {key: _number(value) for key, value in event.items()}
            if type(step) is not int:
                continue
            if event["event"] == EVALUATED:
                figures.setdefault(step, {}).update(seen | (_best(event.get("best")) if self._best else {}))
            else:
                curve[step] = self._loss(figures.get(step, {}), seen.get("loss"))
        return curve


def _number(value: Any) -> float:
    """A figure of a journal, where NaN and infinity are null."""
    return value if type(value) in (int, float) else math.nan


def _best(told: Any) -> dict[str, float]:
    """Metric -> its best value so far; empty if an event does not tell it."""
    return {} if fault(told, BEST) else {name: float(best["value"]) for name, best in told.items()}


def _events(url: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a journal that tell of figures; none if it is missing."""
    try:
        data = store.ending(url, LARGEST)
    except StoreError as error:
        if error.kind == "missing":
            return
        raise
    for line in data.splitlines():
        if any(wanted in line for wanted in WANTED):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and row.get("event") in (EVALUATED, *ENDED):
                yield row
