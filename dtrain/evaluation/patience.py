"""Ends a run whose held-out figure improves no more: `stop.metric`, `stop.patience`."""

import math
from collections.abc import Mapping
from typing import Any

from dtrain.config.period import Period, is_due
from dtrain.mesh import Mesh
from dtrain.storage.attempts import best_step


class Patience:
    """`stop`: the figure `metric` and whether its lowest or highest value `is_best`; the number of evaluations,
    `patience`, that may pass without one better by more than `least`. Nothing ends the run if it is empty.

    `seen`: step -> value of the evaluations on record, on rank 0, which decides. Evaluations count that are due every
    `every` steps, so that a run that was stopped, killed or rewound ends at the step of one that was not.
    """

    def __init__(self, stop: Mapping[str, Any], *, every: Period, mesh: Mesh, seen: Mapping[int, float]) -> None:
        self._stop, self._every, self._mesh = stop, every, mesh
        self._seen = dict(seen)

    def see(self, step: int, figures: Mapping[str, float]) -> None:
        """Record an evaluation after `step`."""
        if self._stop and self._stop["metric"] in figures:
            self._seen[step] = figures[self._stop["metric"]]

    def over(self, step: int) -> str:
        """Why the run ends after `step`; empty if it goes on. All ranks call it and get the same answer."""
        if not self._stop:
            return ""
        reason: str = self._mesh.gather(self._reason(step))[0]
        return reason

    def best(self, step: int) -> dict[str, dict[str, float]]:
        """Metric -> `value` and `step` of the best evaluation up to `step`; empty if there is none."""
        seen = {at: value for at, value in self._seen.items() if at <= step}
        best = best_step(seen, self._stop["is_best"]) if self._stop else None
        return {} if best is None else {self._stop["metric"]: {"value": seen[best], "step": best}}

    def _reason(self, step: int) -> str:
        sign = 1 if self._stop["is_best"] == "lowest" else -1
        best, since, waited = math.inf, 0, 0
        for at in sorted(at for at in self._seen if at <= step and is_due(self._every, at)):
            value = sign * self._seen[at]
            if value < best - self._stop["least"]:
                best, since, waited = value, at, 0
            else:
                waited += 1
        if waited < self._stop["patience"]:
            return ""
        return f"{self._stop['metric']} has not improved in {waited} evaluations, since step {since}"
