"""Parts of one's own that lack what a run asks of them, or return something else."""

import os
from typing import Any

import torch.nn.functional as F

from dtrain.objective import Loss
from dtrain.objective.classification import Classification
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

    def scalars(self, step: int, row: Any) -> None:
        pass


class Timeless:
    """A hook that does not say when it wants to be called."""

    def __call__(self, info: Any) -> None:
        pass


class OnOneRank(Classification):
    """An objective with a metric that only one rank has."""

    def loss(self, outputs: Any, batch: Any) -> Loss:
        loss = super().loss(outputs, batch)
        return (
            loss if int(os.environ.get("RANK", "0")) else Loss(loss.sum, {**loss.metrics, "seldom": loss.sum.detach()})
        )


class InSomeBatches(Classification):
    """An objective with a metric that whole microbatches of 4 lack."""

    def loss(self, outputs: Any, batch: Any) -> Loss:
        loss = super().loss(outputs, batch)
        return loss if len(batch["targets"]) == 4 else Loss(loss.sum, {**loss.metrics, "seldom": loss.sum.detach()})
