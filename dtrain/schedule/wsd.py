"""Warm-up, stable, decay (arXiv 2404.06395): linear up, flat, linear down to `floor`."""

from dtrain.schedule import warmed, within


class WSD:
    def __init__(self, *, steps: int, warmup: float, decay: float, floor: float) -> None:
        self._steps, self._floor = steps, floor
        self._warmup, self._decay = within(warmup, steps), within(decay, steps)

    def factor(self, step: int) -> float:
        left = (self._steps - step) / self._decay if self._decay > 0 else 1.0
        return min(warmed(step, self._warmup), self._floor + (1 - self._floor) * min(1.0, max(0.0, left)))
