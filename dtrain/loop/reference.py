"""The frozen model that an objective compares the trained one with: what the run began as, or a teacher.

An adapter that is switched off is what its run began as. Any other reference is a second model on the same mesh, split
by the same strategy, without gradients or optimizer state. No checkpoint holds its weights: it holds where they lie and
their digest, and a run that goes on reads them again and compares.
"""

import inspect
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
from dtrain.errors import StoreError, WordsError
from dtrain.loop.step import call, check
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local
from dtrain.model import construct, evaluating, own_class, reshard
from dtrain.model.adapted import switched_off
from dtrain.model.seeds import derive
from dtrain.objective import Compared, chunk_asked
from dtrain.parallel.order import parallelize
from dtrain.planned import Part, Plan
from dtrain.precision import Precision
from dtrain.storage import store
from dtrain.weights.names import held
from dtrain.weights.owner import owner_of


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


class Frozen(Reference):
    """A second model, with the weights that the run begins with. `moved`: where they are looked for if they are not
    where they were.
    """

    moved: str | None = None
    names: Any = None
    """The value of init_names."""
    lost = "cannot load the weights that the run began with, which its objective compares with"
    hint = "init=<where they are now>"

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
            facts = {"url": _lasting(self._fill(checkpoint, state)), "names": held(self.names)}
            state.reference = {**facts, "digest": digest(self.model, self._mesh)}

    def _aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(self, batch: Batch, inputs: Any) -> Batch:
        seen = super().__call__(batch, inputs)
        reshard(self._forward)  # a backward would, but there is none
        return seen

    @torch.no_grad()
    def _fill(self, checkpoint: Checkpoint, state: TrainState) -> str | None:
        """Its weights, for the first time. Returns where they are from; None: made of the seed."""
        mine = self.model.state_dict(keep_vars=True)
        for name, tensor in state.model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                local(mine[name]).copy_(local(tensor))
        return state.source

    def _places(self, known: Mapping[str, Any]) -> list[str]:
        """Where to look for the weights again."""
        return list(dict.fromkeys(url for url in (known["url"], self.moved) if url))

    def _load_again(self, checkpoint: Checkpoint, known: Mapping[str, Any]) -> None:
        faults = list[str]()
        for url in self._places(known) if known["url"] else [None]:
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
            f"{self.lost}: {'; '.join(faults)}. Bring them back (their digest begins with {known['digest'][:8]}), or "
            f"type {self.hint}."
        )


@final
class Teacher(Frozen):
    """A model of its own, with the weights at `place`, which a run that goes on names again."""

    place: str
    lost = "cannot load the teacher that the run began with"
    hint = "objective.teacher=<where they are now>"
    _seen = False

    def __call__(self, batch: Batch, inputs: Any) -> Batch:
        if not self._seen:
            self._seen = True
            self._check(batch, inputs)
        return super().__call__(batch, inputs)

    def _check(self, batch: Batch, inputs: Any) -> None:
        """Raises WordsError if it does not take these inputs, or mixes the documents of a row."""
        takes = inspect.signature(self.model.forward).parameters
        named = inputs if isinstance(inputs, Mapping) else ()
        open_to_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
        if lacking := [name for name in named if name not in takes and not open_to_all]:
            raise WordsError(
                f"objective.teacher={self.place}: its {own_class(self.model).__name__} takes no {', '.join(lacking)}, "
                "which the data gives. Name other data.inputs, or another teacher."
            )
        check(
            self._forward,
            objective=self._objective,
            batch=batch,
            context=None,
            mesh=self._mesh,
            precision=self._precision,
        )

    def _fill(self, checkpoint: Checkpoint, state: TrainState) -> str | None:
        checkpoint.load_weights(self.place, TrainState(self.model))
        return self.place

    def _places(self, known: Mapping[str, Any]) -> list[str]:
        return [self.place]


def reference_of(
    plan: Plan, mesh: Mesh, facts: Mapping[str, Any], objective: Any, precision: Precision,
    trained: tuple[nn.Module, nn.Module],
) -> Reference | None:  # fmt: skip
    """The reference that the objective of `plan` states, without weights; None if it has none. `facts`: of the data;
    `trained`: the model and its forward.
    """
    kind = about(plan.objective).get("reference")
    if kind is None:
        return None
    chunk = chunk_asked(objective)
    if kind == "teacher":
        name = str(plan.objective["teacher"])
        found = mesh.on_rank_0(f"look at the teacher {name}", lambda: vars(owner_of(name)))
        second = _second(plan, mesh, facts, precision, found["part"], brought=True, chunk=chunk)
        teacher = Teacher(*second, objective, mesh, precision)
        teacher.place = found["url"]
        return teacher
    if fact(plan.adapter, "trains") == "adapter":
        return Reference(*trained, objective, mesh, precision)
    second = _second(plan, mesh, facts, precision, plan.model, brought=bool(plan.init or plan.fork), chunk=chunk)
    frozen = Frozen(*second, objective, mesh, precision)
    frozen.moved, frozen.names = plan.init or plan.fork, plan.init_names
    return frozen


def _second(
    plan: Plan,
    mesh: Mesh,
    facts: Mapping[str, Any],
    precision: Precision,
    part: Part,
    *,
    brought: bool,
    chunk: int | str,
) -> tuple[nn.Module, nn.Module]:
    """A frozen model and its forward, split as the trained one is."""
    model = construct(part, facts=facts, seed=derive(plan.seed, "model"))
    model.requires_grad_(False)
    forward = parallelize(
        model, mesh, build(plan.strategy), precision=precision, seed=plan.seed, pipeline=plan.pipeline,
        tensors=plan.tensor, compile=build(plan.compile), brought=brought, chunk=chunk,
    )  # fmt: skip
    forward.eval()
    return model, forward


def _lasting(url: str | None) -> str | None:
    """A URL that means the same in another working folder."""
    return str(Path(store.local_path(url)).absolute()) if url and store.is_local(url) else url
