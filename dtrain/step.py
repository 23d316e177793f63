"""One optimizer step's worth of forwards and backwards: plain accumulation over microbatches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dtrain import seeds
from dtrain.data.stream import Stream
from dtrain.mesh import Mesh
from dtrain.objective import Objective
from dtrain.precision import Precision
from dtrain.strategy import Strategy


@dataclass(frozen=True)
class StepLoss:
    """This rank's part of a step: `sums` (the loss and the objective's metrics, 0-dim) over the `count` of the whole batch."""

    sums: Mapping[str, Tensor]
    count: int


Step = Callable[[Stream, int], StepLoss]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """A mapping of inputs becomes keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def make_step(model: nn.Module, objective: Objective, strategy: Strategy, mesh: Mesh, *, precision: Precision, seed: int) -> Step:
    """(stream, step number) -> StepLoss, leaving gradients of the mean over the whole batch (times the loss scale) in the model."""

    def step(stream: Stream, number: int) -> StepLoss:
        share = next(stream)
        seeds.reseed(seed, number, mesh.data_rank)
        # strategies average gradients over the data ranks, the loss is a sum over all of them; under fp16 `clip` makes up for it,
        # or more ranks would overflow earlier
        weight = (precision.scale.value if precision.scale else mesh.data_ranks) / max(1, share.count)
        sums: dict[str, Tensor] = {}
        for index, batch in enumerate(share.microbatches):
            with strategy.sync(model, index == len(share.microbatches) - 1):
                with precision.autocast(mesh.device):
                    loss = objective.loss(call(model, objective.inputs(batch)), batch)
                (loss.sum * weight).backward()
            for name, value in (("loss", loss.sum.detach()), *loss.metrics.items()):
                sums[name] = sums[name] + value if name in sums else value
        return StepLoss(sums, share.count)

    return step


def gradients_of(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that are trained, listed once: walking the modules every step costs more than a small model's backward."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def zero(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
