"""Calls the constructors of a plan, in order: for training, for evaluation, and for your own loop."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import nn

from dtrain.build import build
from dtrain.checkpoint import Checkpoint
from dtrain.checkpoint import commit as commits
from dtrain.checkpoint.state import TrainState
from dtrain.config.facts import about
from dtrain.data import Batch, Classed, Growing, Padding, Source, Typed, whole
from dtrain.data.stream import Stream, Streamed, as_source
from dtrain.errors import WordsError, about_data
from dtrain.files.targetless import as_trained
from dtrain.loop.reference import Reference, reference_of
from dtrain.loop.step import Step, make_step
from dtrain.mesh import Mesh
from dtrain.model import blocks, caveats, construct
from dtrain.model.attention import check_padding, mask_beside, unmasked
from dtrain.model.limits import limits_of
from dtrain.model.patterns import check_rates
from dtrain.model.seeds import derive
from dtrain.objective import Objective, check_padded, chunk_asked, counted, prepared, redirected
from dtrain.objective.state import check_parameters
from dtrain.optim import Optimizer
from dtrain.optim.ema import EMA
from dtrain.optim.step import check_step
from dtrain.parallel.context import Context, context_of
from dtrain.parallel.order import parallelize
from dtrain.planned import Part, Plan
from dtrain.precision import Precision
from dtrain.predict import blockless
from dtrain.schedule import Schedule
from dtrain.strategy import Strategy

NAMED = 3
"""Classes that a sentence names."""


@dataclass(frozen=True)
class Parts:
    """The parts of a plan on one rank. `model`: this rank's part of it, with the plain names of its parameters;
    `forward`: the module to call.
    """

    plan: Plan
    mesh: Mesh
    precision: Precision
    strategy: Strategy
    objective: Objective
    source: Source
    context: Context | None
    parameters: int
    """The number of parameters of the whole model."""
    trained: frozenset[str]
    """The names of those that have a gradient, before anything was split."""
    model: nn.Module
    forward: nn.Module
    reference: Reference | None = None
    """The frozen model that the objective compares with."""
    beside: str | None = None
    """The input beside which the model takes an attention_mask of padded rows; None if it needs none."""

    def begin(self, checkpoint: Checkpoint, state: TrainState, *, resumed: bool = False) -> None:
        """Call once `state` has the weights that the run begins with, or `resumed` those of a later step of it; all
        ranks call it. Raises StoreError if the weights that its objective compares with are not those of then.
        """
        if self.reference:
            self.reference.begin(checkpoint, state, resumed=resumed)

    @property
    def caveats(self) -> list[str]:
        """Caveats about this run of the model."""
        data = self.plan.data
        return [
            *caveats(self.model),
            *unmasked(self.model, data.get("pad"), data.get("inputs")),
            *blockless.notes(self.plan, blocks=any(blocks(self.model))),
        ]

    @cached_property
    def heldout(self) -> Source | None:
        """The samples held out for evaluation."""
        return self.source.holdout()

    @cached_property
    def measured(self) -> Mapping[str, Source]:
        """All that is evaluated: the held-out samples, by an empty name, and the further sets."""
        held = {} if self.heldout is None else {"": self.heldout}
        return held | {name: self._set(name, part) for name, part in self.plan.evaluate_sets.items()}

    def like_trained(self, source: Source) -> Source:
        """A source of other samples, which gives the model the mask that it needs, and fractions where training did."""
        if isinstance(source, Typed) and isinstance(self.source, Typed) and source is not self.source:
            source.with_fractions(self.source.fractions())
        if self.beside is not None and isinstance(source, Padding):
            source.with_mask(self.beside)
        return source

    def beside_training(self, built: Any) -> Source:
        """All samples of data beside that of training, as held-out ones are: with the classes, fractions and mask of
        training, as the objective takes them. Raises WordsError and PreflightError for a class that training lacks.
        """
        source, trained = whole(as_source(built)), self.source
        if isinstance(source, Classed) and isinstance(trained, Classed) and trained.class_names:
            source.as_classes(trained.class_names)
        self.like_trained(source)
        return prepared(self.objective, source, derive(self.plan.seed, "objective"))

    def _set(self, name: str, part: Part) -> Source:
        """A further set. Raises WordsError if it has classes that the model lacks."""
        with about_data(f"evaluate.sets.{name}"):
            source = self.beside_training(build(as_trained(part, self.plan.data)))
            if about(self.plan.objective).get("task") != "classification" or "outputs" not in self.plan.model:
                return source
            stated, found = self.plan.model["outputs"], source.facts.get("outputs")
            classes = stated if isinstance(stated, int) else self.source.facts.get("outputs")
        if isinstance(classes, int) and isinstance(found, int) and found > classes:
            raise WordsError(
                f"evaluate.sets.{name}: its targets are of {found} classes, 0 to {found - 1}, and the model has "
                f"{classes}. Type model.outputs={found}, or leave out the rows of the other classes."
            )
        return source


@dataclass(frozen=True)
class Training:
    """The parts of training beside those of the model: `step(stream, number)` leaves gradients in the model,
    `optimizer` and `schedule` use them, `state` is saved.
    """

    optimizer: Optimizer
    schedule: Schedule
    stream: Stream
    step: Step
    state: TrainState


def assemble(plan: Plan, mesh: Mesh, *, brought: bool = False, training: bool = True, judged: bool = True) -> Parts:
    """Call the constructors of `plan` and lay the model out over `mesh`; all ranks call it.

    `brought`: a checkpoint will fill the weights, so they are not initialised. `training`: apply remat and compile.
    `judged`: the objective will be called, so its reference is built too.
    Raises WordsError for a model that cannot be split as the plan says.
    """
    precision: Precision = build(plan.precision)
    strategy: Strategy = build(plan.strategy)
    objective: Objective = build(plan.objective, Objective)
    check_parameters(objective)
    places = [plan.out, plan.fork] if training else [plan.init or plan.out]
    built = source_of(plan, mesh, places if brought else [])
    if isinstance(built, Streamed):
        built.begin(mesh.data_rank, mesh.data_ranks, plan.batch.local)
    _check_words(plan, built)
    source = prepared(objective, built, derive(plan.seed, "objective"))
    if isinstance(built, Streamed) and source is not built:
        raise WordsError("objective: it changes samples by their index, and data=stream has none. Name other data.")
    facts = facts_of(source, plan)
    model = construct(plan.model, facts=facts, seed=derive(plan.seed, "model"), adapter=plan.adapter)
    model = redirected(objective, model)
    check_rates(model, plan.optim.get("lr_of") or {})
    check_padding(model, plan.data.get("pad"))
    beside = mask_beside(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    forward = parallelize(
        model, mesh, strategy, precision=precision, seed=plan.seed, pipeline=plan.pipeline, tensors=plan.tensor,
        remat=build(plan.remat) if training else None, compile=build(plan.compile) if training else None,
        brought=brought, chunk=chunk_asked(objective),
    )  # fmt: skip
    context = context_of(mesh, plan.context["attention"])
    reference = None
    if judged:
        reference = reference_of(plan, mesh, facts, objective=objective, precision=precision, trained=(model, forward))
    parts = Parts(
        plan=plan,
        mesh=mesh,
        precision=precision,
        strategy=strategy,
        objective=objective,
        source=source,
        context=context,
        parameters=parameters,
        trained=trained,
        model=model,
        forward=forward,
        reference=reference,
        beside=beside,
    )
    parts.like_trained(source)
    return parts


def _check_words(plan: Plan, source: Source) -> None:
    """Raises WordsError for a regression on targets that are words."""
    if about(plan.objective).get("task") == "regression" and isinstance(source, Classed) and source.class_names:
        raise WordsError(
            f"objective=regression: the targets are names of classes ({', '.join(source.class_names[:NAMED])}). Type "
            "objective=classification, or name a column of numbers."
        )


def source_of(plan: Plan, mesh: Mesh, places: Sequence[str | None]) -> Source:
    """The data of a plan, with the samples, and so the classes, that it had for the newest checkpoint at the first of
    these places that has one; all ranks call it.
    """
    source = as_source(build(plan.data))
    if isinstance(source, Growing) and any(places):
        begun = mesh.on_rank_0("look for checkpoints", lambda: commits.data_of(filter(None, places)))
        source.as_of(str(begun))
    return source


def facts_of(source: Source, plan: Plan) -> Mapping[str, Any]:
    """The facts of the data that a model is built by. An objective that needs an output for each number of a target
    says how many there are, whatever classes whole numbers would be.
    """
    if not about(plan.objective).get("alike") or plan.data.get("outputs") is not None:
        return source.facts
    batch = source.first() if isinstance(source, Streamed) else source.take(np.array([0]), np.array([0]))
    outputs = batch["targets"][0].numel()
    return {**source.facts, "outputs": outputs, "vocab": outputs}


def prepare(parts: Parts, *, began: float | None = None) -> Training:
    """Optimizer, schedule, data and state at step 0. `began`: start of the run by `time.perf_counter`; now if None.

    Close `stream` at the end: threads and processes read ahead for it.
    """
    plan, mesh, model = parts.plan, parts.mesh, parts.model
    ema = EMA(model, plan.ema) if plan.ema is not None else None
    optimizer: Optimizer = build(plan.optim, Optimizer, model=model)
    check_step(optimizer)
    schedule: Schedule = build(plan.schedule, Schedule, steps=plan.steps)
    seed = derive(plan.seed, "data")
    end = plan.last_step * plan.batch.size
    limits = limits_of(model)

    def check(batch: Batch) -> None:
        limits.check(batch)
        check_padded(parts.objective, batch)

    stream = Stream(
        parts.source, batch=plan.batch, mesh=mesh, seed=seed, count=partial(counted, parts.objective), end=end,
        check=check, apart=plan.data.get("pad") is not None and plan.mesh.pp == 1,
    )  # fmt: skip
    step = make_step(
        parts.forward, parts.objective, parts.strategy, mesh,
        precision=parts.precision, seed=plan.seed, context=parts.context, reference=parts.reference,
        whole=about(plan.objective).get("whole"),
    )  # fmt: skip
    began = time.perf_counter() if began is None else began
    state = TrainState(model, optimizer, stream, parts.precision.scale, ema, began=began, moved=plan.init)
    return Training(optimizer, schedule, stream, step, state)
