"""Seconds on the cores of this host, from the figures that `dtrain doctor` measured there (dtrain.cluster.measured).

    rate of a rank = that of one thread alone x what its other threads add x what the other ranks leave
                     / (ranks x threads / cores), if they are more than the cores

What threads add, and ranks leave, is measured with as many as cores, and taken to grow with their number.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dtrain.cluster.measured import Figures
from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict.collectives import Call
from dtrain.predict.shapes import Block, Shapes
from dtrain.predict.state_bytes import gathered, holding_of
from dtrain.predict.view import Group

SAME = {"send": "send_recv", "all_to_all": "all_gather", "broadcast": "all_gather"}
"""Collective -> the measured one that moves bytes alike."""
Table = Sequence[Sequence[float]]


def figures_of(plan: Plan) -> Figures | None:
    """Figures of the cores that the plan is for; None for a GPU, another machine, or if nothing was measured."""
    known: Figures | None = fact(plan.cluster, "figures") if plan.device == "cpu" else None
    return known


def are_sent(plan: Plan, call: Call) -> bool:
    """Whether all ranks are on this host, and its calls were measured."""
    known = figures_of(plan)
    kind = SAME.get(call.kind, call.kind)
    return bool(known and plan.world == ranks_here(plan) and (kind in known or kind == "recv"))


def ranks_here(plan: Plan) -> int:
    """Ranks that share a host: nodes of launcher=local do."""
    return plan.devices * (plan.nodes if fact(plan.launcher, "where") == "here" else 1)


def crowding(plan: Plan) -> float:
    """Threads for each core, at least 1: more do not compute more."""
    return max(1.0, ranks_here(plan) * plan.threads / int(plan.cluster["cpus"]))


def product_seconds(plan: Plan, shapes: Shapes, block: Block, operations: float) -> float:
    """Of so many operations in the products of a block."""
    figures, rows = fact(plan.cluster, "figures"), shapes.tokens * plan.batch.microbatch / plan.mesh.cp
    kind = "product_fp32" if fact(plan.precision, "compute") == "fp32" else "product_bf16"
    spent = numbers = 0.0
    for weight in block.weights:
        if not weight.product or not weight.count or len(weight.shape) < 2:
            continue
        *outer, b, a = shape = gathered(plan, weight)
        if weight.experts and outer:
            each = next((one.rows / one.count for one in block.experts), rows) * plan.batch.microbatch
            rate = _rate(plan, figures[kind], each, _mean(a, b))
        elif outer:
            rate = _rate(plan, figures["convolution"], sum(shape[:2]) / 2)  # vectors of either
        else:
            rate = _rate(plan, figures[kind], rows, _mean(a, b))
        numbers, spent = numbers + weight.count, spent + weight.count / rate
    return float(operations * (spent / numbers if numbers else 1 / _rate(plan, figures[kind], rows, rows)))


def attention_seconds(plan: Plan, block: Block, operations: float) -> float:
    """Of so many operations in the attention of a block."""
    tokens = max((one.tokens for one in block.attention), default=1) / plan.mesh.cp
    return operations / _rate(plan, fact(plan.cluster, "figures")["attention"], tokens)


def moved_seconds(plan: Plan, name: str, size: float) -> float:
    """Of operators on each element (`pointwise`) or an optimizer (`update`) that move so many bytes."""
    return size / _rate(plan, fact(plan.cluster, "figures")[name])


def host_seconds(plan: Plan, blocks: Sequence[Block]) -> float:
    """In which Python and torch dispatch the operators of a stage."""
    count = plan.batch.accumulate * sum(block.count * block.dispatched for block in blocks)
    return float(fact(plan.cluster, "figures").get("operator", 0.0)) * count * crowd(plan)


def step_seconds(plan: Plan) -> float:
    """Of a step that depend on no model."""
    return float(fact(plan.cluster, "figures").get("step", 0.0)) * crowd(plan)


def call_seconds(plan: Plan, call: Call, group: Group, *, starts: bool) -> float:
    """Of all calls of a collective. `starts`: also until they begin, and of what the host does around each."""
    figures, cores = fact(plan.cluster, "figures"), int(plan.cluster["cpus"])
    if call.kind == "recv" or not call.calls:
        return 0.0
    table, size = figures[SAME.get(call.kind, call.kind)], call.bytes / call.calls
    least, each = table[0][1], _between(table, size) * max(1.0, size / table[-1][0])
    most = 1.0 if SAME.get(call.kind) == "send_recv" else (group.size - 1) / group.size / ((cores - 1) / cores)
    spent = (each if starts else max(0.0, each - least)) * most
    around = figures.get(_around(plan, call), 0.0) if starts else 0.0
    copied = figures.get("byte", 0.0) * call.bytes if _around(plan, call) == "shards" else 0.0
    return float((call.calls * (spent + around) + copied) * crowd(plan))


def _around(plan: Plan, call: Call) -> str:
    """The figure of what the host does around a call."""
    if call.axis in ("tp", "cp", "ep", "pp"):
        return "pp" if call.axis == "pp" else "tp"
    if call.what in ("weights", "gradients"):
        return "shards" if holding_of(plan).shards else "copies"
    return ""


def crowd(plan: Plan) -> float:
    """Ranks for each core, at least 1."""
    return max(1.0, ranks_here(plan) / int(plan.cluster["cpus"]))


def _mean(*sides: float) -> float:
    """The harmonic mean of the sides of a weight: the time it waits for memory grows with the sum of 1 / side."""
    return len(sides) / sum(1 / max(1.0, side) for side in sides)


def _rate(plan: Plan, ways: Mapping[str, Any], *sizes: float) -> float:
    """The part of a rate that a rank reaches, at these sizes."""
    alone, whole, together = (_between(way, *sizes) for way in ways.values())
    cores, ranks = int(plan.cluster["cpus"]), ranks_here(plan)
    threads = min(plan.threads, cores)
    others = max(1, cores - 1)
    threaded = 1 + (whole / alone - 1) * (threads - 1) / others
    left = 1 + (together / alone - 1) * (min(cores, ranks * threads) - 1) / others if ranks > 1 else 1.0
    return float(alone * threaded * left / crowding(plan))


def _between(value: Any, *sizes: float) -> float:
    """The value of a table at a size between two that were measured, or that of the nearest; of a table of tables, at a
    size of each.
    """
    if not sizes:
        return float(value)
    size, *inner = sizes
    if size <= value[0][0]:
        return _between(value[0][1], *inner)
    for (below, one), (above, other) in pairwise(value):
        if size <= above:
            least, most = (_between(each, *inner) for each in (one, other))
            return float(least + (most - least) * (size - below) / (above - below))
    return _between(value[-1][1], *inner)
