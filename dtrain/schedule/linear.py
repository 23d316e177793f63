"""Warm-up, then a straight line down to `floor` at the end: get_linear_schedule_with_warmup of transformers.

Steps are counted from 0, as there, and from the end of the warm-up on the factors are equal: (steps - step) / (steps -
warmup). Only the warm-up differs: (step + 1) / warmup here, step / warmup there, where the first step learns nothing.
"""

from dtrain.schedule import warmed, within


class Linear:
    def __init__(self, *, steps: int, warmup: float, floor: float) -> None:
        self._steps, self._warmup, self._floor = steps, within(warmup, steps), floor

    def factor(self, step: int) -> float:
        left = (self._steps - step) / max(1.0, self._steps - self._warmup)
        line = self._floor + (1 - self._floor) * min(1.0, max(0.0, left))
        return min(warmed(step, self._warmup), line)
