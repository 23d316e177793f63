"""The frozen model that an objective compares the trained one with: what the run began as.

An adapter that is switched off is what its run began as. Any other reference is a second model on the same mesh, split
by the same strategy, without gradients or optimizer state. No checkpoint holds its weights: it holds where they lie and
their digest, and a run that goes on reads them again and compares.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from dtrain.build import build
from dtrain.checkpoint import Checkpoint
from dtrain.checkpoint.digest import digest
from dtrain.checkpoint.state import TrainState
from dtrain.config.facts import about, fact
from dtrain.data import Batch
from dtrain.errors import StoreError
from dtrain.loop.step import call
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local
from dtrain.model import construct, evaluating, reshard
from dtrain.model.adapted import switched_off
from dtrain.model.seeds import derive
from dtrain.objective import Compared
from dtrain.parallel.order import parallelize
from dtrain.planned import Plan
from dtrain.precision import Precision
from dtrain.storage import store
from dtrain.weights.names import held


class Reference:
    """Without its adapter, the trained model itself: `model` is what has the adapter, `forward` what is called."""

    def __init__(
        self, model: nn.Module, forward: nn.Module, objective: Compared, mesh: Mesh, precision: Precision
    ) -> None:
        self.model, self._forward, self._objective = model, forward, objective
        self._mesh, self._precision = mesh, precision

    def __call__(self, batch: Batch, inputs: Any) -> Batch:
        """`batch` and what the objective needs of the reference's outputs, as `reference`; all ranks call it."""
        with evaluating(self._forward), self._aside(), self._precision.autocast(self._mesh.device):
            return {**batch, "reference": self._objective.reference(call(self._forward, inputs), batch)}

    def begin(self, checkpoint: Checkpoint, state: TrainState, *, resumed: bool = False) -> None:
        """Call once the weights of `state` are those that the run begins or goes on with, on all ranks. `resumed`: they
        are of a later step of this run.
        """

    def _aside(self) -> AbstractContextManager[None]:
        return switched_off(self.model)


@final
class Frozen(Reference):
    """A second model, with the weights that the run begins with. `moved`: where they are looked for if they are not
    where they were.
    """

    moved: str | None = None
    names: Any = None
    """The value of init_names."""

    def begin(self, checkpoint: Checkpoint, state: TrainState, *, resumed: bool = False) -> None:
        """Raises StoreError if the weights are not those that the run began with."""
        known = state.reference
        if known is None and resumed:
            raise StoreError(
                "the checkpoint does not say which weights its objective compares with. Type out=<another place> "
                "init=<this run> to begin with its weights."
            )
        if known is not None:
            self._load_again(checkpoint, known)
        else:
            self._copy(state.model)
            facts = {"url": _lasting(state.source), "names": held(self.names)}
            state.reference = {**facts, "digest": digest(self.model, self._mesh)}

    def _aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(self, batch: Batch, inputs: Any) -> Batch:
        seen = super().__call__(batch, inputs)
        reshard(self._forward)  # a backward would, but there is none
        return seen

    @torch.no_grad()
    def _copy(self, model: nn.Module) -> None:
        mine = self.model.state_dict(keep_vars=True)
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                local(mine[name]).copy_(local(tensor))

    def _load_again(self, checkpoint: Checkpoint, known: Mapping[str, Any]) -> None:
        places = list(dict.fromkeys(url for url in (known["url"], self.moved) if url))
        faults = list[str]()
        for url in places if known["url"] else [None]:
            try:
                if url:
                    checkpoint.load_weights(url, TrainState(self.model), known["names"])
            except StoreError as error:
                faults.append(str(error))
                continue
            if digest(self.model, self._mesh) == known["digest"]:
                return
            faults.append(f"the weights {f'at {url}' if url else 'of this seed'} are not those of then")
        raise StoreError(
            f"cannot load the weights that the run began with, which its objective compares with: {'; '.join(faults)}. "
            f"Bring them back (their digest begins with {known['digest'][:8]}), or type init=<where they are now>."
        )


def reference_of(
    plan: Plan, mesh: Mesh, facts: Mapping[str, Any], objective: Any, precision: Precision,
    trained: tuple[nn.Module, nn.Module],
) -> Reference | None:  # fmt: skip
    """The reference that the objective of `plan` states, without weights; None if it has none. `facts`: of the data;
    `trained`: the model and its forward.
    """
    if about(plan.objective).get("reference") is None:
        return None
    if fact(plan.adapter, "trains") == "adapter":
        return Reference(*trained, objective, mesh, precision)
    model = construct(plan.model, facts=facts, seed=derive(plan.seed, "model"))
    model.requires_grad_(False)
    forward = parallelize(
        model, mesh, build(plan.strategy), precision=precision, seed=plan.seed, pipeline=plan.pipeline,
        tensors=plan.tensor, compile=build(plan.compile), brought=bool(plan.init or plan.fork),
    )  # fmt: skip
    frozen = Frozen(model, forward, objective, mesh, precision)
    frozen.moved, frozen.names = plan.init or plan.fork, plan.init_names
    return frozen


def _lasting(url: str | None) -> str | None:
    """A URL that means the same in another working folder."""
    return str(Path(store.local_path(url)).absolute()) if url and store.is_local(url) else url
