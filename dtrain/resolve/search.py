"""The fastest layouts of a run that fit into memory, by prediction: of all that the words leave open, those whose lower
bounds (dtrain.predict.bounds) leave a chance are predicted.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from dtrain.cluster import Cluster, Machine
from dtrain.config.schema import Config
from dtrain.errors import WordsError
from dtrain.planned import MeshShape, PipelineShape, Plan
from dtrain.predict import formulas
from dtrain.predict.bounds import Bounds, Point
from dtrain.predict.prediction import Prediction, predict
from dtrain.predict.shapes import Shapes
from dtrain.predict.state_bytes import Holding, holding_of
from dtrain.resolve import batch, declared, mesh, model_axes, pipeline, reduction
from dtrain.resolve.chunk import sized
from dtrain.resolve.space import Words, applied, details, meshes, tensors

SIMPLER = 1.03
"""A layout that splits the model less is better if its step takes at most this much longer."""
ALIKE = 1.01
"""Steps whose seconds differ less take the same time: the layout that needs less memory is better."""
RULES = mesh.degrees, pipeline.shape, batch.arithmetic, reduction.reduced, model_axes.options
DECIDED = "nodes", "devices", "strategy", "mesh", "pipeline", "batch", "remat", "tensor", "context"
SKETCHED = "strategy", "remat", "tensor"
KEEN = 100
"""Layouts that are predicted of those that need the least memory, where no fast one fits."""
MOST = 150
"""Layouts that are predicted until the search ends with what it has, of 1 to 20 ms each."""


@dataclass(frozen=True)
class Layout:
    """`words`: those that choose it."""

    words: Words
    plan: Plan
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """Of a step."""
        time = self.prediction.time
        return time.seconds if time else float("inf")

    @property
    def peak(self) -> int:
        """Bytes on the fullest rank."""
        return self.prediction.memory.peak

    @property
    def smaller(self) -> str:
        """Which must be smaller to fit: the model, if forwards have one sample or its state alone does not fit."""
        memory = self.prediction.memory
        state = memory.parameters + memory.gradients + memory.optimizer
        return "batch" if self.plan.batch.microbatch > 1 and state < self.prediction.budget else "model"

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for layouts that differ in microbatches and options alone."""
        return self.words.get("strategy"), self.plan.mesh, self.words.get("remat"), self.plan.pipeline.schedule

    @property
    def cost(self) -> tuple[int, bool]:
        return _cost(self.words, self.plan.mesh)

    def worse(self, first: "Layout") -> str:
        """Why the search prefers `first` to this layout, which is faster; empty if it is not."""
        if self.seconds >= first.seconds:
            return ""
        if self.cost > first.cost:
            return "splits the model along more axes" if self.cost[0] > first.cost[0] else "recomputes"
        return "needs more memory"


@dataclass(frozen=True)
class Model:
    """A complete plan of the run on one rank, and its shapes, for strategies that shard it or not. `traced`: no formula
    gives them.
    """

    plan: Plan
    shapes: Shapes
    strategies: Sequence[str]
    traced: bool = False


@dataclass
class Found:
    """`layouts`: those that fit, the best first, of each kind the best. `least`: the one that needs the least memory,
    if none fits. `looked`: layouts that were looked at; `predicted`: those of them that bounds did not decide, of which
    `fit` fit and `small` need more memory than there is, and rules refuse the others; `refused`: why, of the first of
    them, or empty; `unknown`: why the model's size is not known, so nothing was looked at, or empty.
    """

    layouts: list[Layout] = field(default_factory=list)
    least: Layout | None = None
    looked: int = 0
    fit: int = 0
    small: int = 0
    predicted: int = 0
    refused: str = ""
    unknown: str = ""


@dataclass(eq=False)
class Search:
    """One search. `draft`: what earlier rules decided; `budget`: bytes that a rank may use; `keep`: how many kinds of
    layouts are wanted; `most`: how many layouts are predicted at most.
    """

    config: Config
    cluster: Cluster
    draft: Mapping[str, Any]
    models: Sequence[Model]
    machine: Machine
    budget: float
    keep: int = 1
    most: int = MOST
    found: Found = field(default_factory=Found)
    _best: dict[tuple[Any, ...], Layout] = field(default_factory=dict)
    _split: dict[tuple[Any, ...], Shapes] = field(default_factory=dict)
    _tried: set[tuple[tuple[str, Any], ...]] = field(default_factory=set)
    _number: Iterator[int] = field(default_factory=itertools.count)

    def run(self) -> Found:
        """Look at layouts in the order of the time that they take at least."""
        queue = [(least, 0.0, next(self._number), words, shape, model) for least, words, shape, model in self._meshes()]
        heapq.heapify(queue)
        while queue:
            seconds, memory, _, words, shape, model = heapq.heappop(queue)
            if self._enough(seconds):
                break
            if memory:
                if self._wins(seconds, words, shape):
                    self._predict(words, model)
                continue
            for least, needed, choice in self._choices(words, shape, model):
                if needed <= self.budget:
                    heapq.heappush(queue, (least, needed, next(self._number), choice, shape, model))
        if not self._best:
            self._smallest()
        self.found.layouts = self._ranked()
        return self.found

    def tried(self, words: Words) -> Found | None:
        """The finding of a search among these words alone; None if a rule refuses them, or they do not fit."""
        models = (model for model in self.models if words["strategy"] in model.strategies)
        layout = next(filter(None, (self._layout(words, model) for model in models)), None)
        fits = layout is not None and layout.prediction.fits
        return Found([layout], looked=1, predicted=1) if layout and fits else None

    def _choices(self, words: Words, shape: MeshShape, model: Model) -> Iterator[tuple[float, float, Words]]:
        """(seconds and bytes that it takes at least, words) of each layout of a mesh."""
        bounds = self._bounds[model.strategies[0]]
        for choice in details(self.config, words, shape, model.shapes.listed):
            point = self._point(choice, shape, model)
            problem = shape.pp > 1 and pipeline.check_microbatches(point.order, point.accumulate, shape.pp)
            if problem:
                self._refuse(problem)
                continue
            self.found.looked += 1
            yield bounds.seconds(point), bounds.memory(point), choice

    def _smallest(self) -> None:
        """Predict the layouts that need the least memory, up to the first that fits."""
        self.found.looked = 0  # all are looked at again
        every = (
            (needed, choice, model)
            for _, words, shape, model in self._meshes()
            for _, needed, choice in self._choices(words, shape, model)
        )
        for _, choice, model in heapq.nsmallest(KEEN, every, key=lambda each: each[0]):
            self._predict(choice, model)
            if self._best:
                break

    def _enough(self, seconds: float) -> bool:
        """Whether a layout that takes so long at least is not wanted."""
        if self.found.predicted >= self.most:
            return True
        times = sorted(layout.seconds for layout in self._best.values())
        return len(times) >= self.keep and seconds > times[self.keep - 1] * SIMPLER

    def _wins(self, seconds: float, words: Words, shape: MeshShape) -> bool:
        """Whether a layout that takes so long at least may be the first of the ranking, where no other is wanted."""
        every = sorted(self._best.values(), key=_order)
        if self.keep > 1 or not every or seconds <= every[0].seconds:
            return True
        simple = _simplest(every)
        if (cost := _cost(words, shape)) != simple[0].cost:
            return cost < simple[0].cost
        return seconds <= simple[0].seconds * ALIKE

    @cached_property
    def _bounds(self) -> Mapping[str, Bounds]:
        return {model.strategies[0]: Bounds(self.machine, model.shapes) for model in self.models}

    def _meshes(self) -> Iterator[tuple[float, Words, MeshShape, Model]]:
        """(seconds that its layouts take at least, words, mesh, model)."""
        nodes, devices = self.draft["nodes"], self.draft["devices"]
        for model in self.models:
            whole = model.traced and self.keep == 1
            for words in meshes(self.config, model.strategies, nodes, devices, model.shapes, whole=whole):
                shape = self._shape(words)
                if shape is None:
                    continue
                uncut = replace(shape, pp=1)
                points = (self._point({**words, **tensor}, uncut, model) for tensor in tensors(self.config, shape))
                least = min(map(self._bounds[model.strategies[0]].seconds, points))
                yield least / shape.pp, words, shape, model

    def _shape(self, words: Words) -> MeshShape | None:
        """The mesh of these words; None if a rule refuses it."""
        config = applied(self.config, words)
        trial = {**self.draft, "strategy": config.strategy}
        try:
            trial |= mesh.degrees(config, self.cluster, trial)
            trial |= pipeline.shape(config, self.cluster, trial)
        except WordsError as error:
            self._refuse(*error.problems)
            return None
        shape: MeshShape = trial["mesh"]
        problems = [one for rule in (model_axes.model, declared.model) for one in rule(config, self.cluster, trial)]
        self._refuse(*problems)
        return None if problems else shape

    def _point(self, words: Words, shape: MeshShape, model: Model) -> Point:
        """A layout as bounds see it, which no rule has judged."""
        config, local = self.config, max(1, self.config.batch // shape.data)
        micro = words.get("microbatch") or config.microbatch or config.objective.get("together")
        micro = micro or max(1, local // (config.accumulate or 1))
        holding = self._holdings(words["strategy"], words.get("strategy.reduce"), shape.pp)
        data = (holding.frees, holding.cpu) if holding.shards else (words["strategy"],)
        order = self._orders(words.get("pipeline.schedule")) if shape.pp > 1 else PipelineShape()
        options = words.get("remat"), words.get("tensor.sequence"), words.get("tensor.loss")
        sketch = partial(self._sketch, words, shape, model)
        return Point(
            mesh=shape,
            microbatch=micro,
            accumulate=-(-local // micro),
            order=order,
            holding=holding,
            options=options,
            data=data,
            sketch=sketch,
        )

    @cached_property
    def _orders(self) -> Callable[..., PipelineShape]:
        return cache(self._order)

    @cached_property
    def _holdings(self) -> Callable[..., Holding]:
        return cache(self._holding)

    def _order(self, schedule: str | None) -> PipelineShape:
        alike: Words = {"pipeline.split": "blocks", **({"pipeline.schedule": schedule} if schedule else {})}
        config = applied(self.config, alike)
        order: PipelineShape = pipeline.shape(config, self.cluster, {"mesh": MeshShape(pp=2)})["pipeline"]
        return order

    def _holding(self, strategy: str, reduce: str | None, pp: int) -> Holding:
        words = {"strategy": strategy, **({"strategy.reduce": reduce} if reduce else {})}
        return holding_of(self._sketch(words, MeshShape(pp=pp), self.models[0]))

    def _sketch(self, words: Words, shape: MeshShape, model: Model) -> Plan:
        config = applied(self.config, {key: words[key] for key in words if key.partition(".")[0] in SKETCHED})
        return replace(model.plan, mesh=shape, strategy=config.strategy, remat=config.remat, tensor=vars(config.tensor))

    def _predict(self, words: Words, model: Model) -> None:
        key = tuple(words.items())
        if key in self._tried:
            return
        self._tried.add(key)
        self.found.predicted += 1
        layout = self._layout(words, model)
        if layout is None:
            return
        if layout.prediction.fits:
            self.found.fit += 1
            before = self._best.get(layout.kind)
            if before is None or _better(layout, before):
                self._best[layout.kind] = layout
        else:
            self.found.small += 1
            if self.found.least is None or layout.peak < self.found.least.peak:
                self.found.least = layout

    def _layout(self, words: Words, model: Model) -> Layout | None:
        """The layout of these words; None if a rule refuses it."""
        config = applied(self.config, words)
        trial = {**self.draft, "strategy": dict(config.strategy), "remat": config.remat, "why": {}}
        try:
            for rule in RULES:
                trial |= rule(config, self.cluster, trial)
        except WordsError as error:
            self._refuse(*error.problems)
            return None
        if problems := [*model_axes.model(config, self.cluster, trial)]:
            self._refuse(*problems)
            return None
        plan = replace(model.plan, **{name: trial[name] for name in DECIDED})
        shapes = self._shapes(plan, model)
        plan = plan if model.traced else sized(plan, shapes, self.budget)
        return Layout(words, plan, predict(plan, shapes))

    def _refuse(self, *problems: str) -> None:
        self.found.refused = self.found.refused or next(iter(problems), "")

    def _shapes(self, plan: Plan, model: Model) -> Shapes:
        """Those of the model, where a pipeline may compute a head again and so many ranks share sequences."""
        key = model.strategies[0], formulas.again_of(plan), plan.mesh.cp
        if key not in self._split:
            shapes = formulas.shapes(plan)
            self._split[key] = replace(shapes, teacher=model.shapes.teacher) if shapes else model.shapes
        return self._split[key]

    def _ranked(self) -> list[Layout]:
        """The best first, then by time: of the layouts that take little longer than the fastest, those that split the
        model least and recompute nothing, and of these, if they are as fast, the one that needs the least memory.
        """
        layouts = sorted(self._best.values(), key=_order)
        if not layouts:
            return []
        simple = _simplest(layouts)
        alike = [layout for layout in simple if layout.seconds <= simple[0].seconds * ALIKE]
        first = min(alike, key=lambda layout: layout.peak)
        return [first, *(layout for layout in layouts if layout is not first)]


def _cost(words: Words, shape: MeshShape) -> tuple[int, bool]:
    """Number of axes that split the model, and whether it recomputes because the search says so."""
    return sum(getattr(shape, axis) > 1 for axis in ("pp", "cp", "tp", "ep")), "remat" in words


def _simplest(layouts: Sequence[Layout]) -> list[Layout]:
    """Of layouts by time, those that split the model least of all that take little longer than the first."""
    good = [layout for layout in layouts if layout.seconds <= layouts[0].seconds * SIMPLER]
    least = min(layout.cost for layout in good)
    return [layout for layout in good if layout.cost == least]


def _better(one: Layout, other: Layout) -> bool:
    """Whether one of two layouts of a kind is faster, or as fast and needs less memory."""
    if max(one.seconds, other.seconds) <= ALIKE * min(one.seconds, other.seconds):
        return _order(one)[::-1] < _order(other)[::-1]
    return one.seconds < other.seconds


def _order(layout: Layout) -> tuple[float, int]:
    return layout.seconds, layout.peak
