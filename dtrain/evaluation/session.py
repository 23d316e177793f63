"""Models used without training: loaded for evaluate and generate, or called by the hooks of a run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from dtrain import compile
from dtrain.build import build
from dtrain.checkpoint.state import TrainState
from dtrain.data.stream import to_device
from dtrain.errors import StoreError
from dtrain.loop.assemble import Parts, assemble, facts_of, source_of
from dtrain.loop.step import call
from dtrain.mesh import Mesh
from dtrain.model import construct, evaluating
from dtrain.model.adapted import lacks_memory
from dtrain.objective import answer
from dtrain.parallel.order import materialize
from dtrain.planned import Plan
from dtrain.precision import Precision
from dtrain.storage import store

PORTIONS = ("holdout", "holdout_part")
"""The words of data that say how much of it is held out."""


@contextmanager
def load(plan: Plan, *, judged: bool = False) -> Iterator[tuple[Parts, Mapping[str, Any]]]:
    """The parts of `plan` with the weights of `plan.init`, or of the newest checkpoint under `plan.out`, and their
    commit. `judged`: the objective will be called. Raises StoreError.
    """
    with build(plan.backend).open():
        mesh = Mesh(plan.mesh, device=plan.device)
        parts = assemble(plan, mesh, brought=True, training=False, judged=judged)
        checkpoint = build(plan.checkpoint, out=plan.out, mesh=mesh, resume="auto")
        state = TrainState(parts.model)
        commit = checkpoint.load_weights(plan.init or plan.out, state, plan.init_names)
        state.reference = commit["facts"].get("reference")
        parts.begin(checkpoint, state)
        yield parts, commit


def other_data(parts: Parts, commit: Mapping[str, Any]) -> str:
    """A sentence if samples that are held out now may have been trained on: the words name the data of the run, and
    hold out more of it, or its files changed; else empty.
    """
    plan, stream = parts.plan, commit["facts"].get("stream") or {}
    where = store.join(str(commit["url"]).split("/checkpoints/")[0], "plan.yaml")
    try:
        begun = yaml.safe_load(store.read(where))
    except (StoreError, yaml.YAMLError):
        return ""
    then, now = begun.get("data") if isinstance(begun, dict) else None, _words(plan.data)
    if not isinstance(then, dict) or _whole(then) != _whole(now):
        return ""
    more = [name for name in PORTIONS if _number(now.get(name)) > _number(then.get(name))]
    if more and parts.heldout is not None:
        return (
            f"data.{more[0]}={now[more[0]]}: the run trained with data.{more[0]}={then.get(more[0])}, so it saw rows "
            "that are held out now. Name others: evaluate.sets.dev.path=dev.jsonl"
        )
    if then == now and stream.get("fingerprint") not in (None, parts.source.fingerprint):
        return (
            f"the data changed since step {commit['step']} was trained on it, so other samples are held out than then, "
            "of which the model may have seen some"
        )
    return ""


def _whole(part: Mapping[str, Any]) -> dict[str, Any]:
    """The words of data but for how much of it is held out."""
    return {name: value for name, value in part.items() if name not in PORTIONS}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _words(part: Any) -> Any:
    """A part as plan.yaml has it: without what its words say about themselves."""
    if not isinstance(part, Mapping):
        return part
    return {name: _words(value) for name, value in part.items() if name != "_about_"}


def weights(plan: Plan, source: str) -> nn.Module:
    """The model of a one-rank plan with the weights at `source`; data is read only if it gives a size."""
    with build(plan.backend).open():
        mesh = Mesh(plan.mesh, device=plan.device)
        facts = facts_of(source_of(plan, mesh, [source]), plan) if "auto" in plan.model.values() else {}
        model = construct(plan.model, facts=facts, seed=plan.seed, adapter=plan.adapter)
        if lacks_memory(model):
            materialize(model, mesh.device)
        build(plan.checkpoint, out=plan.out, mesh=mesh, resume="auto").load_weights(source, TrainState(model))
        return model


def whole_steps(forward: Callable[[Any], Any], step: int) -> Callable[[Any], Any]:
    """`forward` for tokens [B, T] of any T: they are padded at the end to a multiple of `step`, which does not change
    the other outputs of a causal model. Other inputs, such as features and images, stay as they are.
    """

    def padded(tokens: Any) -> Any:
        is_rows = isinstance(tokens, Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
        short = -tokens.shape[1] % step if is_rows else 0
        return answer(forward(F.pad(tokens, (0, short))))[:, : tokens.shape[1]] if short else forward(tokens)

    return padded


def quiet(model: nn.Module, mesh: Mesh, precision: Precision, *, step: int) -> Callable[[Any], Any]:
    """A forward of a model that is in evaluation mode: without gradients, on the device. `step` is that of
    `whole_steps`.
    """

    def forward(inputs: Any) -> Any:
        compile.begin()
        with torch.no_grad(), precision.autocast(mesh.device):
            return call(model, to_device(inputs, mesh.device))

    return whole_steps(forward, step)


def watch(model: nn.Module, mesh: Mesh, precision: Precision, *, step: int) -> Callable[[Any], Any]:
    """The same for hooks: the model is in evaluation mode during each forward alone."""
    forward = quiet(model, mesh, precision, step=step)

    def evaluated(inputs: Any) -> Any:
        with evaluating(model):
            return forward(inputs)

    return evaluated
