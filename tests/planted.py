"""Loops with faults that hide in a composed run: a missing all-reduce, a wrong loss scale, a stage that is skipped, shards that are none."""

from typing import Any

from torch import Tensor

from dtrain.data import Batch
from dtrain.objective import Loss
from dtrain.objective.next_token import NextToken
from dtrain.parallel.pipeline import Stage
from dtrain.planned import Plan
from dtrain.result import Result
from dtrain.strategy.ddp import DDP
from dtrain.strategy.fsdp import FSDP
from dtrain.train import train


def alone(plan: Plan) -> Result:
    """Every rank keeps its gradients to itself."""
    DDP.wrap = lambda self, model, mesh: model  # type: ignore[method-assign]
    return train(plan)


def louder(plan: Plan) -> Result:
    """The loss counts once for each rank."""
    loss = NextToken.loss

    def scaled(self: NextToken, outputs: Any, batch: Batch) -> Loss:
        return Loss(loss(self, outputs, batch).sum * plan.world)

    NextToken.loss = scaled  # type: ignore[method-assign]
    return train(plan)


def skipping(plan: Plan) -> Result:
    """The blocks of every stage but the first hand on what they got."""
    forward = Stage.forward

    def skip(self: Stage, x: Tensor, **others: Tensor) -> Tensor:
        for block in self.model.blocks if x.is_floating_point() else ():
            block.forward = lambda x, *_: x
        return forward(self, x, **others)

    Stage.forward = skip  # type: ignore[method-assign]
    return train(plan)


def whole(plan: Plan) -> Result:
    """fsdp that shards nothing."""
    FSDP.shard = lambda self, model, mesh, precision: None  # type: ignore[method-assign]
    return train(plan)
