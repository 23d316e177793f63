"""The memory of a device that a prediction may reach. `dtrain plan`, `dtrain plan best`, strategy=auto and the advice
of a plan that does not fit all ask this page.

    cluster word    memory, less what torch's allocator never has (context, communicator, exchange), divided by what it
                    reserves beyond what it gives out (reserve, or reserve_fixed without expandable segments)
"""

from collections.abc import Iterable, Mapping

from dtrain.cluster import Machine
from dtrain.planned import Plan
from dtrain.predict.collectives import Call
from dtrain.predict.view import groups


def budget_of(plan: Plan, machine: Machine | None, calls: Iterable[Call] = ()) -> float:
    """Bytes that torch may give out on a device at once; infinite if the machine is not known. Without `calls`, the
    collectives of the plan, it is that of ranks which do not communicate: an upper bound. Without a GPU, the ranks of a
    host share its memory.
    """
    if machine is None:
        return float("inf")
    share = machine.memory if machine.gpus else machine.memory / plan.devices
    expands = plan.backend.get("segments") == "expandable"
    reserve = machine.reserve if expands or not machine.gpus else machine.reserve_fixed
    return max(0.0, (share - sum(kept(plan, machine, calls).values())) / reserve)


def kept(plan: Plan, machine: Machine | None, calls: Iterable[Call] = ()) -> Mapping[str, float]:
    """Bytes of a device that torch's allocator never has: those of the driver and of libraries, and the buffers of each
    group of ranks that communicates. A group that exchanges rows has a connection to each of its ranks.
    """
    if machine is None:
        return {}
    among = groups(plan)
    used = {(call.axis, call.kind) for call in calls if among[call.axis].size > 1}
    axes, exchanges = {axis for axis, _ in used}, {axis for axis, kind in used if kind == "all_to_all"}
    if among["batch"] == among["world"] and "world" in axes:
        axes.discard("batch")  # it is the same group
    buffers = machine.communicator * len(axes) + machine.exchange * len(exchanges)
    return {"libraries": machine.context, "communicators": buffers}
