"""Where the time of this start went, on one rank: the seconds of its parts, between two flushes and in all."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtrain.result import PARTS


class Spent:
    """`step` is what no other part takes, so that the parts add up to the wall clock. Costs nothing in a step."""

    def __init__(self) -> None:
        self._began = self._since = time.perf_counter()
        self._start = self._inner = self._waited = 0.0
        self._waits: Callable[[], float] = lambda: self._waited
        self._parts, self._rows = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)

    def begin(self, waits: Callable[[], float]) -> None:
        """The loop begins. `waits`: the total seconds that steps waited for samples."""
        self._since = time.perf_counter()
        self._start, self._waits, self._waited = self._since - self._began, waits, waits()
        self._parts = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count what is inside, or a function that this decorates, as this part, except for parts within it."""
        outer, self._inner, began = self._inner, 0.0, time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._parts[part] += seconds - self._inner
            self._inner = outer + seconds

    def row(self) -> dict[str, float]:
        """The columns `time_<part>` since the last row, in seconds."""
        now, waited = time.perf_counter(), self._waits()
        parts = self._parts | {"data_wait": waited - self._waited}
        parts["step"] = max(0.0, now - self._since - sum(parts.values()))
        self._since, self._waited, self._parts = now, waited, dict.fromkeys(PARTS, 0.0)
        self._rows = {part: self._rows[part] + seconds for part, seconds in parts.items()}
        return {f"time_{part}": seconds for part, seconds in parts.items()}

    def in_all(self) -> dict[str, float]:
        """Part -> seconds since this start of the run began; `start` is what came before the loop."""
        self.row()
        return {"start": self._start, **self._rows}
