"""Predicts the time of one optimizer step on a machine, and its breakdown. See it with `dtrain plan cluster=h100x8
nodes=4`.

    step       = pipeline + data-axis communication that is not hidden + optimizer + gradient norm; on a CPU also STEP
    pipeline   = microbatches of every stage in the order of the schedule (dtrain.predict.schedule); without a
                 pipeline, accumulate x microbatch
    microbatch = products / (peak x efficiency) x (1 + waits for memory) + attention / (peak x its efficiency)
                 + activation traffic / memory bandwidth + communication of tp, ep, cp;
                 on a GPU at least the time to launch its kernels, on a CPU also that to dispatch its operators
    a call     = start + hops x latency + bytes on the wire / (bandwidth x LINK)   (alpha-beta, over the slowest link)

A ring moves (n - 1) / n of the bytes that n ranks gather or scatter, and twice that for an all-reduce
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md); its k ranks on a node share k links out of it.
Gathers and reductions over the data axes overlap with compute, except the first and the last one, and slow it down. The
head and attention are computed in bf16 with precision=fp8. A ring computes its blocks with the kernels of whole
sequences, at their efficiency; what torch has no fused kernel for, at the speed of fp32. MFU and TFLOP/s count what a
step needs, with attention as a full square, against the peak (PaLM, arXiv 2204.02311, appendix B): the forward, and in
the backward twice as much, without the gradients of frozen weights (`adapter=lora`: about 2 x the forward in all,
`model.freeze`: nothing below the first trained weight). What is recomputed does not count.

It is an estimate: how far off for which kind of run is in tests/bench/RESULTS.md.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dtrain.build import build
from dtrain.cluster import Machine
from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict import formulas, measured
from dtrain.predict.collectives import Call
from dtrain.predict.memory import Memory
from dtrain.predict.schedule import length_of
from dtrain.predict.shapes import Block, Shapes, in_tiles, stages_of
from dtrain.predict.state_bytes import StateBytes, gathered, holding_of
from dtrain.predict.view import Group, groups
from dtrain.predict.work import recomputed

LINK = 0.8
"""Fraction of link bandwidth that large collectives reach: nccl-tests shows 360 to 370 of 450 GB/s on eight H100."""
NARROW = 0.3
"""Fraction of the memory traffic of matrix products that is not hidden behind their operations."""
CONTENTION = 0.2
"""Seconds by which a second of communication slows down the compute that hides it: its kernels take cores and memory
bandwidth.
"""
CAUSAL = 0.5
"""Fraction of the attention square that kernels compute."""
HOST_BANDWIDTH = 2e11
"""Bytes per second of host memory, for an optimizer that runs there: eight channels of DDR5-4800 at two thirds of their
peak.
"""
STARTING = 2e-4
"""Seconds in which a host launches the kernels of one block on a GPU, forward and backward. An assumption: fifty
compiled kernels of 4 us each, as a lower bound.
"""
DISPATCH = 6e-5
"""Seconds in which Python and torch dispatch the operators of one weight on a CPU, forward and backward, beside
computing them: tests/bench/history.md.
"""
STEP = 3e-4
"""Seconds of a step on a CPU that depend on no model: batch, clipping, rates, rows. Measured with DISPATCH."""
BLOCKING = ("tp", "ep", "cp")
"""Axes whose collectives are not overlapped with compute."""


@dataclass(frozen=True)
class Time:
    """Seconds of one step on the slowest rank; `collectives`: exposed communication per axis, `hidden`: overlapped
    communication, `contention`: the time that it costs; `rank_flops`: useful operations per second of a rank.
    """

    products: float
    attention: float
    activations: float
    starting: float
    collectives: Mapping[str, float]
    hidden: float
    contention: float
    waits: float
    optimizer: float
    seconds: float
    samples_per_second: float
    tokens_per_second: float
    rank_flops: float
    mfu: float
    bubble: float


class Computing(NamedTuple):
    """Seconds in which a rank computes."""

    products: float
    attention: float
    activations: float


def time(
    plan: Plan, shapes: Shapes, memory: Memory, machine: Machine, calls: Sequence[tuple[Call, ...]]
) -> Time | None:
    """Predict the time of a step from the collectives of each pipeline rank; None if the work of the model is not
    known.
    """
    if shapes.unknown:
        return None
    every = stages_of(plan, shapes)
    stages = _each(lambda blocks: compute_seconds(plan, shapes, blocks, machine), every)
    owners = plan.pipeline.owners(plan.mesh.pp) if plan.mesh.pp > 1 else [0]
    sent = _each(lambda each: blocking_seconds(plan, machine, each), calls)
    starting = [start_seconds(plan, blocks, sum(stage)) for blocks, stage in zip(every, stages, strict=True)]
    busy = [
        sum(stages[index]) + starting[index] + sum(sent[owner].values()) / owners.count(owner)
        for index, owner in enumerate(owners)
    ]
    rank_busy = _per_rank(plan, busy, owners)
    slowest = max(range(plan.mesh.pp), key=rank_busy.__getitem__)
    mine = [index for index, owner in enumerate(owners) if owner == slowest]
    pipeline = _pipeline(plan, shapes, busy, _hop(plan, machine, calls[0]))
    computing = Computing(*map(sum, zip(*(stages[index] for index in mine), strict=True)))
    idle = sum(starting[index] for index in mine)
    beside, hidden = _data_axes(plan, machine, calls[slowest], sum(computing) + idle)
    optimizer = update_seconds(plan, memory, machine)
    fixed = step_seconds(plan)
    seconds = pipeline + sum(beside.values()) + contention(plan, hidden) + optimizer + fixed
    waited = {axis: spent for axis, spent in (sent[slowest] | beside).items() if spent > 0}
    waits = max(0.0, pipeline - rank_busy[slowest])
    samples = plan.batch.size / seconds
    rank_flops = _useful(plan, shapes) / (seconds * plan.world)
    return Time(
        products=computing.products,
        attention=computing.attention,
        activations=computing.activations,
        starting=idle + fixed,
        collectives=waited,
        hidden=hidden,
        contention=contention(plan, hidden),
        waits=waits,
        optimizer=optimizer,
        seconds=seconds,
        samples_per_second=samples,
        tokens_per_second=samples * shapes.tokens,
        rank_flops=rank_flops,
        mfu=rank_flops / _peak(plan, machine),
        bubble=waits / pipeline,
    )


def _each(make: Callable[[Any], Any], of: Sequence[Any]) -> list[Any]:
    """`make` of each, once of those that are one object."""
    known = {id(one): make(one) for one in {id(one): one for one in of}.values()}
    return [known[id(one)] for one in of]


def at_peak(plan: Plan) -> float | None:
    """Seconds of a step that only runs matrix products at the peak of the GPUs; divided by the seconds of a real step,
    its MFU. None if GPUs or model are not known.
    """
    shapes = formulas.shapes(plan) if plan.cluster.get("gpus") else None
    if shapes is None:
        return None
    return _useful(plan, shapes) / (plan.world * _peak(plan, build(plan.cluster)))


def sent_seconds(plan: Plan, machine: Machine, call: Call, *, starts: bool = True) -> float:
    """Seconds of all calls together in this plan; `starts`: also until they begin."""
    group = groups(plan)[call.axis]
    if measured.are_sent(plan, call):
        return measured.call_seconds(plan, call, group, starts=starts)
    quick = machine if starts else replace(machine, start=0, intra_node_latency=0, inter_node_latency=0)
    return call_seconds(call, group, quick, plan.devices)


def call_seconds(call: Call, group: Group, machine: Machine, devices: int) -> float:
    """Seconds of all calls together, on nodes of `devices` ranks."""
    here = min(group.size, max(1, devices // group.stride))
    nodes = -(-group.size // here)
    size, way = group.size, machine.intra_node if nodes == 1 else min(machine.intra_node, here * machine.inter_node)
    share, hops = (size - 1) / size, size - 1
    if call.kind == "all_reduce":
        share, hops = 2 * share, 2 * hops
    elif call.kind in ("send", "recv"):
        share, hops, way = float(call.kind == "send"), 1, machine.intra_node if nodes == 1 else machine.inter_node
    elif call.kind == "all_to_all" and nodes > 1:
        share, way = (size - here) / size, machine.inter_node
    between = (2 if call.kind == "all_reduce" else 1) * (nodes - 1)
    hop = (hops - between) * machine.intra_node_latency + between * machine.inter_node_latency
    if call.kind == "all_reduce":  # small ones use a tree
        deep = math.ceil(math.log2(nodes))
        hop = min(hop, 2 * ((here - 1) * machine.intra_node_latency + deep * machine.inter_node_latency))
    if call.kind == "recv":
        return 0.0
    return call.calls * (machine.start + max(0.0, hop)) + call.bytes * share / (way * LINK)


def _useful(plan: Plan, shapes: Shapes) -> float:
    """Operations of a step that the MFU counts."""
    each = (
        block.count * (block.work + _backward(block) + block.attention_work * (3 if block.grad_out else 1))
        for block in shapes.blocks
    )
    return 2.0 * plan.batch.size * sum(each)


def _backward(block: Block) -> int:
    """Multiply-adds of products that the backward of a block needs, without what it computes again."""
    most = 2 * block.work
    if block.chunk and not block.chunk.trained:
        most -= block.chunk.tokens * block.chunk.numbers
    return min(block.backward_work, most)


def _peak(plan: Plan, machine: Machine, inside: bool = True) -> float:
    """FLOP per second of one rank; `inside`: in the products of the blocks."""
    compute = fact(plan.precision, "compute")
    kind = fact(plan.precision, "flops", compute) if inside else compute
    flops = machine.flops.get(kind, machine.flops.get("bf16", machine.flops["fp32"]))
    return flops * (1 if machine.gpus else plan.threads / measured.crowding(plan))


def _attention_peak(plan: Plan, machine: Machine, block: Block) -> float:
    """FLOP per second of one rank in the attention of a block."""
    fused = _peak(plan, machine, False)
    if any(in_tiles(plan, one) for one in block.attention):
        return min(fused, machine.flops["fp32"] * (1 if machine.gpus else plan.threads / measured.crowding(plan)))
    return fused


def _bandwidth(plan: Plan, machine: Machine) -> float:
    """Memory bandwidth of one rank in bytes per second."""
    return machine.bandwidth / (1 if machine.gpus else measured.ranks_here(plan))


def compute_seconds(plan: Plan, shapes: Shapes, blocks: tuple[Block, ...], machine: Machine) -> Computing:
    """Seconds per step that one rank spends on a stage."""
    samples, split = plan.batch.local, plan.mesh.tp * plan.mesh.cp
    again, moves = recomputed(plan, shapes), float(fact(plan.compile, "moves"))
    rereads = 1.0 if fact(plan.remat, "keeps") == "products" else again
    share, seen = samples / split, measured.figures_of(plan)
    products = attention = moved = 0.0
    for block in blocks:
        more = again * block.listed
        operations = share * block.count * 2 * (block.work + block.backward_work + block.work * more)
        squares = share * block.count * block.attention_work * CAUSAL * (7 + 2 * more)
        moved += samples * block.count * block.saved["all"].of(plan) * (moves + rereads * block.listed)
        moved += samples * _logits(plan, block) * moves
        if seen:
            products += measured.product_seconds(plan, shapes, block, operations)
            attention += measured.attention_seconds(plan, block, squares)
            continue
        waits = 1 + _reads(plan, shapes, block, machine)
        products += operations / (_peak(plan, machine, block.listed) * machine.efficiency) * waits
        attention += squares / (_attention_peak(plan, machine, block) * machine.attention)
    activations = measured.moved_seconds(plan, "pointwise", moved) if seen else moved / _bandwidth(plan, machine)
    return Computing(products, attention, activations)


def _logits(plan: Plan, block: Block) -> float:
    """Bytes of one sample's logits on a rank, where a loss computes them a chunk at a time."""
    chunk = block.chunk
    if chunk is None:
        return 0.0
    split = plan.mesh.cp * (plan.mesh.tp if chunk.split else 1)
    return chunk.tokens * chunk.vocabulary * chunk.bytes / split


def _reads(plan: Plan, shapes: Shapes, block: Block, machine: Machine) -> float:
    """Time in which the products of a block wait for memory, as a part of that of their operations: a product of M x K
    by K x N moves 1 / M + 1 / K + 1 / N elements for each multiply-add, in bf16 as many bytes as operations (the
    roofline model,
    https://doi.org/10.1145/1498765.1498785).
    """
    sizes = [(weight.count, gathered(plan, weight)[-2:]) for weight in block.weights if weight.product and weight.count]
    if not sizes:
        return 0.0
    each = sum(count * sum(1 / side for side in shape) for count, shape in sizes) / sum(count for count, _ in sizes)
    rows = shapes.tokens * plan.batch.microbatch / plan.mesh.cp
    return NARROW * (each + 1 / rows) * _peak(plan, machine, block.listed) / _bandwidth(plan, machine)


def start_seconds(plan: Plan, blocks: tuple[Block, ...], computing: float) -> float:
    """Seconds per step in which a stage starts its operators and computes nothing: on a GPU, launches that `computing`
    does not hide.
    """
    if plan.device == "cuda":
        return max(0.0, STARTING * plan.batch.accumulate * sum(block.count for block in blocks) - computing)
    if measured.figures_of(plan):
        return measured.host_seconds(plan, blocks)
    return (
        measured.crowd(plan)
        * DISPATCH
        * plan.batch.accumulate
        * sum(block.count * len(block.weights) for block in blocks)
    )


def step_seconds(plan: Plan) -> float:
    """Seconds of a step that depend on no model."""
    if plan.device != "cpu":
        return 0.0
    return measured.step_seconds(plan) if measured.figures_of(plan) else STEP * measured.crowd(plan)


def blocking_seconds(plan: Plan, machine: Machine, calls: tuple[Call, ...], *, starts: bool = True) -> dict[str, float]:
    """Axis -> seconds of communication per step that forwards and backwards of one rank wait for."""
    spent = dict[str, float]()
    for call in calls:
        if call.when == "step" and call.axis in BLOCKING and call.what != "optimizer":
            spent[call.axis] = spent.get(call.axis, 0.0) + sent_seconds(plan, machine, call, starts=starts)
    return spent


def _hop(plan: Plan, machine: Machine, calls: tuple[Call, ...]) -> float:
    """Seconds of a transfer between neighbouring pipeline ranks."""
    sent = [call for call in calls if call.axis == "pp" and call.kind == "send"]
    return max((sent_seconds(plan, machine, call) / call.calls for call in sent), default=0.0)


def _pipeline(plan: Plan, shapes: Shapes, busy: list[float], hop: float) -> float:
    """Seconds of the whole pipeline."""
    if plan.mesh.pp == 1:
        return busy[0]
    pp, count, again = plan.mesh.pp, plan.batch.accumulate, recomputed(plan, shapes)
    return length_of(
        plan.pipeline,
        pp,
        microbatches=count,
        forward=tuple(spent / count / (3 + again) for spent in busy),
        hop=hop,
        again=again,
    )


def _per_rank(plan: Plan, stages: Sequence[float], owners: Sequence[int]) -> list[float]:
    """The sums over the stages of each pipeline rank."""
    sums = [0.0] * plan.mesh.pp
    for seconds, owner in zip(stages, owners, strict=True):
        sums[owner] += seconds
    return sums


def _data_axes(
    plan: Plan, machine: Machine, calls: tuple[Call, ...], computing: float
) -> tuple[dict[str, float], float]:
    """(axis -> seconds of exposed communication, seconds that overlap with compute)."""
    overlaps = plan.mesh.pp == 1 and (holding_of(plan).shards or holding_of(plan).buckets)
    spent, first, waited = (defaultdict[str, float](float) for _ in range(3))
    for call in calls:
        if call.when != "step" or call.axis == "pp" or (call.axis in BLOCKING and call.what != "optimizer"):
            continue
        seconds = sent_seconds(plan, machine, call)
        if overlaps and call.what in ("weights", "gradients"):
            spent[call.axis] += seconds
            first[call.axis] += seconds / call.calls
        else:
            waited[call.axis] += seconds
    total = sum(spent.values())
    over = max(0.0, total - computing) / total if total else 0.0
    exposed = {axis: max(first[axis], seconds * over) for axis, seconds in spent.items()}
    for axis, seconds in exposed.items():
        waited[axis] += seconds
    return waited, max(0.0, total - sum(exposed.values()))


def contention(plan: Plan, hidden: float) -> float:
    """Seconds that communication costs which overlaps with compute: on a CPU it takes the cores that would compute."""
    return hidden if plan.device == "cpu" else CONTENTION * hidden


def update_seconds(plan: Plan, memory: Memory | StateBytes, machine: Machine) -> float:
    """Seconds of norm, clipping and update: gradients are read for the norm, read and written by clipping, and read by
    the update, which reads and writes weights and optimizer state.

    With offload this happens in host memory, and gradients and weights are transferred.
    """
    moved = 4 * memory.gradients + 2 * (memory.parameters + memory.optimizer)
    if not holding_of(plan).cpu or plan.device == "cpu":
        seen = measured.figures_of(plan)
        return measured.moved_seconds(plan, "update", moved) if seen else moved / _bandwidth(plan, machine)
    transferred = (memory.gradients + memory.parameters) / float(plan.cluster["offload"])
    return moved * plan.devices / HOST_BANDWIDTH + transferred
