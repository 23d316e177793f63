"""Warm-up, then half a cosine down to `floor` (arXiv 1608.03983, without restarts)."""

import math

from dtrain.schedule import warmed, within


class Cosine:
    def __init__(self, *, steps: int, warmup: float, floor: float) -> None:
        self._steps, self._warmup, self._floor = steps, within(warmup, steps), floor

    def factor(self, step: int) -> float:
        done = max(0.0, (step - self._warmup) / max(1.0, self._steps - self._warmup))
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return warmed(step, self._warmup) * (self._floor + (1 - self._floor) * cosine)
