"""Parts of one's own that lack what a run asks of them, or return something else."""

from typing import Any

import torch.nn.functional as F

from dtrain.objective.regression import Regression


class Unfinished:
    """It has no count, no inputs and no unit."""

    def loss(self, outputs: Any, batch: Any) -> Any:
        return None


class BareTensor(Regression):
    def loss(self, outputs: Any, batch: Any) -> Any:
        return F.mse_loss(outputs, batch["targets"])


class BareFigure(Regression):
    def figures(self, sums: Any, count: float) -> Any:
        return sums["loss"]


def factors(steps: int) -> Any:
    """A schedule as torch's LambdaLR takes it."""
    return lambda step: 1 - step / steps


def weights(model: Any) -> Any:
    return list(model.parameters())


class Mute:
    def __init__(self, out: str, steps: int) -> None:
        pass

    def log(self, step: int, row: Any) -> None:
        pass


class Timeless:
    """A hook that does not say when it wants to be called."""

    def __call__(self, info: Any) -> None:
        pass
