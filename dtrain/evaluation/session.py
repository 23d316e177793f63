"""A model that is looked at and not trained: loaded for evaluate and generate, or in the middle of a run for its hooks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dtrain import compile
from dtrain.build import build
from dtrain.checkpoint.state import TrainState
from dtrain.data import Source
from dtrain.data.stream import as_source, to_device
from dtrain.loop.step import call
from dtrain.mesh import Mesh
from dtrain.model import construct, evaluating
from dtrain.model.seeds import derive
from dtrain.objective import Objective, answer
from dtrain.parallel.context import Context, context_of
from dtrain.parallel.order import parallelize
from dtrain.plan import Plan
from dtrain.precision import Precision


@dataclass(frozen=True)
class LoadedModel:
    """The model as it is called, with the commit its weights came from."""

    model: nn.Module
    source: Source
    objective: Objective
    mesh: Mesh
    precision: Precision
    context: Context | None
    commit: Mapping[str, Any]


@contextmanager
def look_at(plan: Plan) -> Iterator[LoadedModel]:
    """The weights of `plan.init`, or of the newest checkpoint under `plan.out`, on the plan's mesh. Raises StoreError."""
    with build(plan.backend).open():
        mesh = Mesh(plan.mesh, device=plan.device)
        precision: Precision = build(plan.precision)
        source = as_source(build(plan.data))
        model = construct(plan.model, facts=source.facts, seed=derive(plan.seed, "model"))
        wrapped = parallelize(
            model,
            mesh,
            build(plan.strategy),
            precision=precision,
            seed=plan.seed,
            pipeline=plan.pipeline,
            tensors=plan.tensor,
            brought=True,
        )
        checkpoint = build(plan.checkpoint, out=plan.out, mesh=mesh, resume="auto")
        commit = checkpoint.load_weights(plan.init or plan.out, TrainState(model))
        yield LoadedModel(
            wrapped,
            source,
            build(plan.objective, Objective),
            mesh,
            precision,
            context_of(mesh, plan.context["attention"]),
            commit,
        )


def whole_steps(forward: Callable[[Any], Any], step: int) -> Callable[[Any], Any]:
    """`forward` for tokens [B, T] of any T: they are filled up to a multiple of `step`, which a causal model does not
    see before they come.
    """

    def padded(tokens: Any) -> Any:
        short = -tokens.shape[1] % step if isinstance(tokens, Tensor) and step > 1 else 0
        return answer(forward(F.pad(tokens, (0, short))))[:, : tokens.shape[1]] if short else forward(tokens)

    return padded


def watch(model: nn.Module, mesh: Mesh, precision: Precision, *, step: int) -> Callable[[Any], Any]:
    """A forward for hooks: no gradients, evaluation mode, inputs moved to the device; `step` as in `whole_steps`."""

    def forward(inputs: Any) -> Any:
        compile.begin()
        with evaluating(model), precision.autocast(mesh.device):
            return call(model, to_device(inputs, mesh.device))

    return whole_steps(forward, step)
