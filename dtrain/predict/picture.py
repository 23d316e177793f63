"""Draws a plan as text: the ranks of each axis and node, and the timeline of a pipeline."""

import math
from collections.abc import Iterator, Mapping

from dtrain.planned import AXES, Plan
from dtrain.predict.schedule import Action, Timeline, timeline
from dtrain.predict.view import groups

MOST_NODES, MOST_ROWS = 8, 16
"""Most items that are drawn; of longer lists, the first ones and the number of the others."""
FORWARD, BACKWARD, WEIGHTS = "0123456789", "abcdefghij", "ABCDEFGHIJ"
LEGEND = "0-9 forward of a microbatch, a-j its backward, A-J its weight gradients alone, · idle"


def mesh(plan: Plan, width: int = 100) -> list[str]:
    """Lines of the nodes with their ranks, innermost groups in brackets, then of every axis with its groups. Empty for
    one rank.
    """
    if plan.world == 1:
        return []
    among = groups(plan)
    inner = next((among[axis].size for axis in reversed(AXES) if among[axis].size > 1), 1)
    drawn = min(plan.nodes, MOST_NODES if plan.world <= MOST_NODES * 8 else 1)
    lines = [_node(plan, node, inner, width) for node in range(drawn)]
    if drawn < plan.nodes:
        lines.append(f"{plan.nodes - drawn} more nodes, up to rank {plan.world - 1}")
    for axis in (*AXES, "ep"):
        group = among[axis]
        if group.size > 1 and not (axis == "cp" and plan.mesh.dp_shard == 1):
            name, reach = (
                "dp_shard x cp" if axis == "dp_shard" and plan.mesh.cp > 1 else axis,
                group.stride * group.size,
            )
            far = reach - group.stride >= plan.devices or (reach > plan.devices and plan.devices % reach)
            where = "across nodes" if far and plan.nodes > 1 else "inside a node"
            ranks = _ranks(group.size, group.stride)
            lines.append(f"{name}={group.size}: {plan.world // group.size} group(s) such as {ranks}, {where}")
    return lines


def pipeline(plan: Plan, width: int = 100) -> list[str]:
    """One line per pipeline rank, time from left to right, with all stages taken as equal; then the legend. Empty
    without a pipeline.
    """
    if plan.mesh.pp == 1:
        return []
    pp, digits = plan.mesh.pp, len(str(plan.mesh.pp))
    columns = width - digits - 1
    count, schedule = _drawn(plan, columns)
    lines = [f"{rank:>{digits}} {''.join(_row(schedule, rank, columns))}" for rank in range(min(pp, MOST_ROWS))]
    if pp > MOST_ROWS:
        lines.append(f"and {pp - MOST_ROWS} more")
    legend = LEGEND
    if count < plan.batch.accumulate:
        legend += f"; drawn with {count} microbatches, the step has {plan.batch.accumulate}"
    if schedule.length > columns:
        legend += "; too narrow to draw every action"
    return [*lines, legend]


def _drawn(plan: Plan, columns: int) -> tuple[int, Timeline]:
    """Number of microbatches to draw, in whole rounds as far as they fit, and their timeline."""
    pp, count = plan.mesh.pp, plan.batch.accumulate
    count = min(count, 4 * pp) if count % pp == 0 else count
    schedule = timeline(plan.pipeline, pp, count)
    while schedule.length > columns and count % pp == 0 and count > 2 * pp:
        count -= pp
        schedule = timeline(plan.pipeline, pp, count)
    return count, schedule


def _node(plan: Plan, node: int, inner: int, width: int) -> str:
    first = node * plan.devices
    ranks = [str(rank) for rank in range(first, first + plan.devices)]
    cut = math.gcd(inner, plan.devices) if plan.devices % inner else inner
    pieces = (" ".join(ranks[begin : begin + cut]) for begin in range(0, plan.devices, cut))
    line = f"node {node}  " + " ".join(f"[{piece}]" for piece in pieces)
    return line if len(line) <= width else f"node {node}  ranks {first} to {first + plan.devices - 1}"


def _ranks(size: int, stride: int) -> str:
    each = [str(place * stride) for place in range(min(size, 8))]
    return ",".join(each if size <= 8 else [*each[:3], "...", str((size - 1) * stride)])


def _row(schedule: Timeline, rank: int, columns: int) -> Iterator[str]:
    """The letters of one rank, scaled to the width: each forward is several letters, or several forwards are one."""
    scale = max(1, int(columns / schedule.length)) if schedule.length <= columns else columns / schedule.length
    length, row, place = math.floor(schedule.length * scale), schedule.rows[rank], 0
    for column in range(length):
        now = (column + 0.5) / scale
        while place < len(row) and row[place][1] <= now:
            place += 1
        yield _letter(row[place][2]) if place < len(row) and row[place][0] <= now else "·"


def _letter(action: Action) -> str:
    letters: Mapping[str, str] = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHTS}
    return letters[action.kind][action.microbatch % 10]
