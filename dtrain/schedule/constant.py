"""Warm-up, then the same learning rate to the end."""

from dtrain.schedule import steps_of, warmed


class Constant:
    def __init__(self, *, steps: int, warmup: float) -> None:
        self._warmup = steps_of(warmup, steps)

    def factor(self, step: int) -> float:
        return warmed(step, self._warmup)
