"""Lower bounds of the time and memory of a layout, a few microseconds each, with which a search leaves out most layouts
unpredicted.

They come from one rank that holds the whole model: a pipeline of pp ranks takes at least 1 / pp of its time, and that
of the bubble, and as long as a rank with its part of the blocks, rounded up; its fullest rank holds at least 1 / pp of
the weights.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dtrain.cluster import Machine
from dtrain.config.facts import fact
from dtrain.planned import BatchShape, MeshShape, PipelineShape, Plan
from dtrain.predict.collectives import collectives, of_data_axes
from dtrain.predict.measured import figures_of
from dtrain.predict.schedule import actions
from dtrain.predict.shapes import Shapes, types_of
from dtrain.predict.state_bytes import Holding, count_state, gathered, holding_of
from dtrain.predict.time import (
    BLOCKING,
    blocking_seconds,
    compute_seconds,
    contention,
    sent_seconds,
    start_seconds,
    update_seconds,
)
from dtrain.predict.work import recomputed

KEPT = 0.95
"""Fraction of the saved activations that is certain: a peak may be between two microbatches."""
MANY = 4096
"""Samples of a microbatch so large that a step of it is as quick as it can be."""
FEW = 2
"""Microbatches for each rank of a pipeline, of which more keep no more activations."""


class Point(NamedTuple):
    """A layout as bounds see it. `options`: words of remat and of the sequence and loss under tp, on which the work of
    a sample depends; `data`: words on which what the data axes send and hold depends.
    """

    mesh: MeshShape
    microbatch: int
    accumulate: int
    order: PipelineShape
    holding: Holding
    options: tuple[Hashable, ...]
    data: tuple[Hashable, ...]
    sketch: Callable[[], Plan]
    """Makes a plan of it."""


@dataclass
class Bounds:
    """Bounds for the layouts of one model on one machine. What several layouts share is computed once."""

    machine: Machine
    shapes: Shapes
    _known: dict[Hashable, Any] = field(default_factory=dict)

    def seconds(self, point: Point) -> float:
        """Seconds that a step takes at least."""
        mesh, count, holding = point.mesh, point.accumulate, point.holding
        axes, data = (mesh.tp, mesh.cp, mesh.ep), (mesh.dp_shard, mesh.dp_replicate, point.data)
        sample: Sample = self._known.get(work := (_sample, axes, point.options)) or self._first(work, point)
        sent: Data = self._known.get(wires := (_data, axes, data)) or self._first(wires, point)
        launches = sample.launches * count
        spent = sample.seconds * point.microbatch * count
        busy = (spent + launches if sample.beside else max(spent, launches)) / mesh.pp
        every = count if mesh.pp == 1 else 1
        sending = (
            sent.weights * (every if holding.frees else 1) + sent.gradients * (every if holding.every else 1)
        ) / mesh.pp
        if mesh.pp > 1:
            idle = 0.0 if fact(point.order.order, "splits_backward") else (mesh.pp - 1) / point.order.stages
            most = -(-self.shapes.listed // mesh.pp) / max(1, self.shapes.listed)
            return max(busy * (1 + idle / count), sample.blocks * point.microbatch * count * most) + sending
        exposed = max(0.0, sending - busy) if holding.shards or holding.buckets else sending
        return busy + exposed + sent.contention * (sending - exposed) + sent.update

    def memory(self, point: Point) -> float:
        """Bytes that the fullest rank holds at least."""
        mesh, count, holding = point.mesh, point.accumulate, point.holding
        axes, data = (mesh.tp, mesh.cp, mesh.ep), (mesh.dp_shard, mesh.dp_replicate, point.data)
        sample: Sample = self._known.get(work := (_sample, axes, point.options)) or self._first(work, point)
        state: Data = self._known.get(at_rest := (_data, axes, data)) or self._first(at_rest, point)
        unreduced = holding.shards and (mesh.pp > 1 or (count > 1 and not holding.every))
        gradients = (state.unreduced if unreduced else state.reduced) / mesh.pp
        gathered = state.gathered if holding.shards and not holding.frees else 0.0
        few = min(count, FEW * mesh.pp)
        part: float = self._known.get(pipe := (point.order, mesh.pp, few)) or self._flying(pipe)
        activations = sample.saved * point.microbatch * part
        both = activations + gradients if count > 1 else max(activations, gradients)
        return (state.kept + gathered) / mesh.pp + both

    def _first(self, key: tuple[Any, ...], point: Point) -> Any:
        """The figure that `key` begins with, of a rank that holds the whole model and has one sample."""
        plan, mesh = point.sketch(), replace(point.mesh, pp=1)
        one = replace(plan, mesh=mesh, batch=BatchShape(mesh.data, 1, mesh.data, 1), pipeline=PipelineShape())
        self._known[key] = key[0](one, self.shapes, self.machine)
        return self._known[key]

    def _flying(self, key: tuple[PipelineShape, int, int]) -> float:
        """Part of the activations of a microbatch that the first rank of a pipeline keeps: others hardly keep more."""
        (order, pp, few), blocks = key, self.shapes.listed
        if pp == 1 or not blocks:
            return 1.0
        owners = order.owners(pp)
        sizes, flying, most = order.sizes([1] * blocks, len(owners)), 0, 0
        for kind, stage, _ in actions(order, pp, few, 0):
            flying += {"F": sizes[stage], "I": 0}.get(kind, -sizes[stage])
            most = max(most, flying)
        self._known[key] = most / blocks
        return most / blocks


class Sample(NamedTuple):
    """Seconds in which a rank computes and waits for the communication of a sample, in all and in `blocks` that stages
    share out, and in which it starts the operators of a microbatch; `beside`: one after the other. `saved`: bytes of
    activations that a sample keeps for its backward.
    """

    seconds: float
    blocks: float
    launches: float
    beside: bool
    saved: float


def _sample(plan: Plan, shapes: Shapes, machine: Machine) -> Sample:
    starts = start_seconds(plan, shapes.blocks, 0.0)
    blocks = replace(shapes, blocks=tuple(block for block in shapes.blocks if block.listed))
    kept = [fact(plan.remat, "keeps"), fact(plan.compile, "keeps")]
    if kept[0] == "inputs" and not recomputed(plan, shapes):
        kept[0] = "all"
    least = (
        min(block.saved[keeps].of(plan) for keeps in kept) * block.count for block in shapes.blocks if block.listed
    )
    each, inner = (_each(plan, some, machine) for some in (shapes, blocks))
    return Sample(each, inner, starts, plan.device == "cpu", KEPT * sum(least))


def _each(plan: Plan, shapes: Shapes, machine: Machine) -> float:
    """Seconds of a sample."""
    many = replace(plan, batch=BatchShape(plan.batch.data * MANY, MANY, plan.batch.data, 1))
    calls = tuple(call for call in collectives(many, shapes) if call.what != "gradients")
    waits = sum(blocking_seconds(many, machine, calls, starts=False).values())  # a call is of a microbatch
    return (sum(compute_seconds(many, shapes, shapes.blocks, machine)) + waits) / MANY


class Data(NamedTuple):
    """Seconds in which weights are gathered once, gradients are reduced once, and an update runs; `contention`: what a
    second of communication costs that overlaps with compute. Bytes of weights and of the optimizer's state (`kept`), of
    gradients after (`reduced`) and before they are reduced, and of gathered weights.
    """

    weights: float
    gradients: float
    update: float
    contention: float
    kept: float
    reduced: float
    unreduced: float
    gathered: float


def _data(plan: Plan, shapes: Shapes, machine: Machine) -> Data:
    spent = {"weights": 0.0, "gradients": 0.0}
    for call in of_data_axes(plan, shapes):
        if call.what in spent and call.axis not in BLOCKING:
            spent[call.what] += sent_seconds(plan, machine, call, starts=figures_of(plan) is None)
    away, types, sizes = holding_of(plan).cpu and plan.device != "cpu", types_of(plan), count_state(plan, shapes.blocks)
    whole = sum(
        block.count * weight.trained * math.prod(gathered(plan, weight)) * types.param
        for block in shapes.blocks
        for weight in block.weights
    )
    return Data(
        **spent,
        update=update_seconds(plan, sizes, machine),
        contention=contention(plan, 1.0),
        kept=0 if away else sizes.parameters + sizes.optimizer + sizes.average,
        reduced=0 if away else sizes.gradients,
        unreduced=whole,
        gathered=whole / types.param * types.compute,
    )
