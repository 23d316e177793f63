"""How long one optimizer step takes on a machine, and with what its seconds are spent. See it with `dtrain plan
cluster=h100x8 nodes=4`.

    step       = pipeline + data axes not hidden + optimizer + gradient norm
    pipeline   = every stage's microbatches in the order of the schedule (dtrain.predict.schedule); without one,
                 accumulate x a microbatch
    microbatch = products / (peak x efficiency) + activations moved / memory bandwidth + what tp, ep and cp send; on a
                 GPU no less than starting it takes
    a call     = start + hops x latency + bytes that cross / (bandwidth x LINK)   (alpha-beta, over the slowest link)

A ring carries (n - 1) / n of what n ranks gather or scatter, twice that of what they reduce for all
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md), and its k ranks on a node share k ways out of it.
What is gathered and reduced over the data axes hides behind the computing, but for the first and the last piece. MFU
counts 3 x the forward, attention as a whole square, against the peak (PaLM, arXiv 2204.02311, appendix B).

It is an estimate: of published runs it was between 0.6 and 1.6 times as fast (tests/predict/test_time.py).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dtrain.build import build
from dtrain.cluster import Machine
from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict import formulas
from dtrain.predict.collectives import Call, collectives
from dtrain.predict.memory import Memory
from dtrain.predict.schedule import timeline
from dtrain.predict.shapes import Block, Shapes, stages_of
from dtrain.predict.state_bytes import holding_of
from dtrain.predict.view import Group, groups
from dtrain.predict.work import recomputed, work

LINK = 0.8
"""The share of a link that large collectives reach: nccl-tests shows 360 to 370 of 450 GB/s on eight H100."""
MOVED = 4
"""How often the bytes that wait for a backward are moved: written, read, and their gradients too."""
CAUSAL = 0.5
"""Of the square of attention that kernels compute."""
HOST_BANDWIDTH = 2e11
"""Bytes per second of a host's memory, where the optimizer works there: eight channels of DDR5-4800 at two thirds."""
STARTING = 2e-4
"""Seconds in which a host starts the kernels of one block on a GPU, forward and backward: fifty compiled ones of 4 us
each. Assumed; no model is faster.
"""
ON_THE_WAY = ("tp", "ep", "cp")
"""Axes whose collectives a microbatch waits for."""


@dataclass(frozen=True)
class Time:
    """Seconds of one step, of the rank that takes longest; `collectives` by axis is what is waited for, `hidden` what
    is not.
    """

    products: float
    activations: float
    starting: float
    collectives: Mapping[str, float]
    hidden: float
    waits: float
    optimizer: float
    seconds: float
    samples_per_second: float
    tokens_per_second: float
    mfu: float
    bubble: float


def time(plan: Plan, shapes: Shapes, memory: Memory, machine: Machine) -> Time | None:
    """None where the model's work is not known."""
    if shapes.unknown:
        return None
    peak, bandwidth = _peak(plan, machine), _bandwidth(plan, machine)
    stages = [_computing(plan, shapes, blocks, machine) for blocks in stages_of(plan, shapes)]
    owners = plan.pipeline.owners(plan.mesh.pp) if plan.mesh.pp > 1 else [0]
    calls = [collectives(plan, shapes, rank) for rank in range(plan.mesh.pp)]
    sent = [_on_the_way(plan, machine, each) for each in calls]
    starting = [_starting(plan, blocks) for blocks in stages_of(plan, shapes)]
    busy = [
        max(sum(stages[index]), starting[index]) + sum(sent[owner].values()) / owners.count(owner)
        for index, owner in enumerate(owners)
    ]
    slowest = max(
        range(plan.mesh.pp), key=lambda rank: sum(busy[index] for index, owner in enumerate(owners) if owner == rank)
    )
    mine = [index for index, owner in enumerate(owners) if owner == slowest]
    pipeline = _pipeline(plan, shapes, busy, _hop(plan, machine, calls[0]))
    products, moved = (sum(stages[index][part] for index in mine) for part in (0, 1))
    idle = sum(max(0.0, starting[index] - sum(stages[index])) for index in mine)
    beside, hidden = _data_axes(plan, machine, calls[slowest], products + moved + idle)
    optimizer = _optimizer(plan, memory, bandwidth)
    seconds = pipeline + sum(beside.values()) + optimizer
    waited = {axis: spent for axis, spent in (sent[slowest] | beside).items() if spent > 0}
    waits = max(0.0, pipeline - sum(busy[index] for index in mine))
    samples = plan.batch.size / seconds
    return Time(
        products, moved, idle, waited, hidden, waits, optimizer, seconds, samples, samples * shapes.tokens,
        3 * work(plan, shapes).forward / (seconds * plan.world * peak), waits / pipeline,
    )  # fmt: skip


def at_peak(plan: Plan) -> float | None:
    """Seconds of a step of nothing but products at the peak of the ranks' GPUs: over the seconds of a step, its MFU.
    None where GPUs or model are not known.
    """
    shapes = formulas.shapes(plan) if plan.cluster.get("gpus") else None
    return (
        3 * work(plan, shapes).forward / (plan.world * _peak(plan, build(plan.cluster)))
        if shapes and not shapes.unknown
        else None
    )


def call_seconds(call: Call, group: Group, machine: Machine, devices: int) -> float:
    """Of all `call.calls` together, on nodes of `devices` ranks."""
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
    if call.kind == "all_reduce":  # small ones go up and down a tree
        hop = min(
            hop,
            2 * ((here - 1) * machine.intra_node_latency + math.ceil(math.log2(nodes)) * machine.inter_node_latency),
        )
    if call.kind == "recv":
        return 0.0
    return call.calls * (machine.start + max(0.0, hop)) + call.bytes * share / (way * LINK)


def _peak(plan: Plan, machine: Machine) -> float:
    """Operations per second of one rank."""
    compute = fact(plan.precision, "compute")
    found = machine.flops.get(fact(plan.precision, "flops", compute), machine.flops.get("bf16", machine.flops["fp32"]))
    return found * (1 if machine.gpus else plan.threads)


def _bandwidth(plan: Plan, machine: Machine) -> float:
    """Of the memory of one rank."""
    return machine.bandwidth / (1 if machine.gpus else plan.devices)


def _computing(plan: Plan, shapes: Shapes, blocks: tuple[Block, ...], machine: Machine) -> tuple[float, float]:
    """Seconds of a step that one rank spends on a stage: (with products, with moving activations)."""
    samples, split = plan.batch.local, plan.mesh.tp * plan.mesh.cp
    again = recomputed(plan, shapes.listed)
    operations = moved = 0.0
    for block in blocks:
        forward, attention_work = block.work, block.attention_work * CAUSAL
        each = (
            2 * (forward + block.backward_work)
            + 7 * attention_work
            + (2 * (forward + attention_work) * again if block.listed else 0.0)
        )
        operations += block.count * each * samples / split
        moved += block.count * block.kept["all"].of(plan) * samples * (MOVED + again * block.listed)
    return operations / (_peak(plan, machine) * machine.efficiency), moved / _bandwidth(plan, machine)


def _starting(plan: Plan, blocks: tuple[Block, ...]) -> float:
    """Seconds of a step in which the host starts a stage's kernels. What computes longer than that hides them."""
    return STARTING * plan.batch.accumulate * sum(block.count for block in blocks) if plan.device == "cuda" else 0.0


def _on_the_way(plan: Plan, machine: Machine, calls: tuple[Call, ...]) -> dict[str, float]:
    """Axis -> seconds of a step that forwards and backwards of one rank wait for."""
    among, spent = groups(plan), dict[str, float]()
    for call in calls:
        if call.when == "step" and call.axis in ON_THE_WAY and call.what != "optimizer":
            spent[call.axis] = spent.get(call.axis, 0.0) + call_seconds(call, among[call.axis], machine, plan.devices)
    return spent


def _hop(plan: Plan, machine: Machine, calls: tuple[Call, ...]) -> float:
    """Seconds from the end of an action on one rank of the pipeline until its neighbour may begin."""
    sent = [call for call in calls if call.axis == "pp" and call.kind == "send" and call.when == "step"]
    return max(
        (call_seconds(call, groups(plan)["pp"], machine, plan.devices) / call.calls for call in sent), default=0.0
    )


def _pipeline(plan: Plan, shapes: Shapes, busy: list[float], hop: float) -> float:
    """Of many microbatches the first rounds are simulated; the rest take as long as the slowest rank."""
    if plan.mesh.pp == 1:
        return busy[0]
    pp, count, again = plan.mesh.pp, plan.batch.accumulate, recomputed(plan, shapes.listed)
    few = count if count <= 8 * pp or count % pp else 8 * pp
    each = [spent / count for spent in busy]
    unit = tuple(spent / (3 + again) for spent in each)
    owners = plan.pipeline.owners(pp)
    rank = max(sum(spent for spent, owner in zip(each, owners, strict=True) if owner == rank) for rank in range(pp))
    return timeline(plan.pipeline, pp, few, unit, hop, again).length + (count - few) * rank


def _data_axes(
    plan: Plan, machine: Machine, calls: tuple[Call, ...], computing: float
) -> tuple[dict[str, float], float]:
    """(axis -> seconds that are waited for, seconds that are hidden behind the computing)."""
    among, spent, first = groups(plan), dict[str, float](), dict[str, float]()
    waited: dict[str, float] = {}
    overlaps = plan.mesh.pp == 1 and (holding_of(plan).shards or holding_of(plan).buckets)
    for call in calls:
        if call.when != "step" or call.axis == "pp" or (call.axis in ON_THE_WAY and call.what != "optimizer"):
            continue
        seconds = call_seconds(call, among[call.axis], machine, plan.devices)
        if overlaps and call.what in ("weights", "gradients"):
            spent[call.axis] = spent.get(call.axis, 0.0) + seconds
            first[call.axis] = first.get(call.axis, 0.0) + seconds / call.calls
        else:
            waited[call.axis] = waited.get(call.axis, 0.0) + seconds
    total = sum(spent.values())
    over = max(0.0, total - computing) / total if total else 0.0
    for axis, seconds in spent.items():
        waited[axis] = waited.get(axis, 0.0) + max(first[axis], seconds * over)
    return waited, max(0.0, total - sum(max(first[axis], seconds * over) for axis, seconds in spent.items()))


def _optimizer(plan: Plan, memory: Memory, bandwidth: float) -> float:
    """Gradients are read for the norm, read and written by the clip, read by the update, which reads and writes weights
    and its own state.

    Where state rests in the host's memory it is moved there, and gradients and weights cross over.
    """
    moved = 4 * memory.gradients + 2 * (memory.parameters + memory.optimizer)
    if not holding_of(plan).cpu or plan.device == "cpu":
        return moved / bandwidth
    return moved * plan.devices / HOST_BANDWIDTH + (memory.gradients + memory.parameters) / float(
        plan.cluster["offload"]
    )
