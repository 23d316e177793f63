"""Bandwidth between the ranks of a plan: a loop, `Plan -> Result`, that measures collectives over the axes of the
mesh instead of training.

Bus bandwidth is that of nccl-tests, so that figures can be held against published ones and against the wire, whatever
the number of ranks: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.planned import Plan
from dtrain.result import Result, versions

SIZES = {"gloo": (4 << 10, 1 << 20, 16 << 20), "nccl": (4 << 10, 4 << 20, 256 << 20)}
"""Bytes of a message: the smallest shows how long a collective takes at least."""
FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}
"""Bus bandwidth = bytes / seconds x this, for n ranks. `bytes`: of the whole tensor, that is of all parts that are
gathered or scattered.
"""
# since torch 2.13 the usual names warn that they are old
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
MEASURE_SECONDS, FEWEST, MOST = 0.06, 3, 50
"""How long one figure is measured, and in how many repetitions."""


def measure(plan: Plan) -> Result:
    """`metrics`: `links`, a row for each axis, size and operation; `ranks`, what each of them is. The same on every
    rank.
    """
    began = time.perf_counter()
    with build(plan.backend).open():
        mesh = Mesh(plan.mesh, device=plan.device)
        ranks = mesh.gather(_who(mesh))
        mesh.barrier()
        for facts, now in zip(ranks, mesh.gather(time.time()), strict=True):
            facts["clock"] = now
        links = [row for name, group in groups(mesh) for row in rows(mesh, name, group)]
        return Result("finished", 0, None, time.perf_counter() - began, {"links": links, "ranks": ranks}, versions())


def groups(mesh: Mesh) -> Iterator[tuple[str, Any]]:
    """The world, and the axes that are longer than one, each with this rank's group; all ranks make them in this order.
    An axis that is the world is one row.
    """
    yield "world", dist.group.WORLD
    shape = mesh.shape
    for axis, view in {
        "pp": "stored",
        "dp_replicate": "stored",
        "dp_shard": "stored",
        "cp": "computed",
        "tp": "stored",
        "ep": "experts",
    }.items():
        if 1 < getattr(shape, axis) < mesh.world:
            yield axis, mesh.axis(axis, view=view).get_group()


def rows(mesh: Mesh, name: str, group: Any) -> list[dict[str, Any]]:
    """Figures of all groups of an axis at the same time, as in training: the slowest rank's. `right`: whether every
    rank was given what it should.
    """
    found = []
    count = dist.get_world_size(group)
    for backend, device in (("nccl", "cuda"), ("gloo", "cpu")):
        if device != mesh.device.type and (device == "cuda" or name != "world"):
            continue
        for operation, size in product(FACTORS, SIZES[backend]):
            numbers = size // 4 // count * count
            call = _call(operation, numbers, count, group, mesh.device if device == "cuda" else torch.device("cpu"))
            seconds, right = _measured(mesh, call, device)
            busbw = 4 * numbers / seconds * FACTORS[operation](count)
            row = {"axis": name, "ranks": count, "backend": backend, "operation": operation, "bytes": 4 * numbers}
            found.append({**row, "seconds": seconds, "busbw": busbw, "right": right})
    return found


@dataclass(frozen=True)
class Call:
    """`act` sends `given` and fills `taken`, each element of which is `expected` where all of `given` are 1."""

    act: Callable[[], object]
    given: Tensor
    taken: Tensor
    expected: float


def _call(operation: str, numbers: int, count: int, group: Any, device: torch.device) -> Call:
    """An operation of `count` ranks over `numbers` fp32 numbers in all."""
    whole, part = torch.zeros(numbers, device=device), torch.zeros(numbers // count, device=device)
    if operation == "all_reduce":
        return Call(lambda: dist.all_reduce(whole, group=group), whole, whole, count)
    if operation == "all_gather":
        return Call(lambda: GATHER(whole, part, group=group), part, whole, 1)
    if operation == "reduce_scatter":
        return Call(lambda: SCATTER(part, whole, group=group), whole, part, count)
    arrived, here = torch.zeros(numbers, device=device), dist.get_rank(group)
    after, before = (dist.get_global_rank(group, (here + step) % count) for step in (1, -1))

    def exchange() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, whole, after, group), dist.P2POp(dist.irecv, arrived, before, group)]
        ):
            work.wait()

    return Call(exchange, whole, arrived, 1)


def _measured(mesh: Mesh, call: Call, device: str) -> tuple[float, bool]:
    """The median of one call on the slowest rank, and whether its answer was right everywhere; what the first call sets
    up is not counted.
    """
    call.given.fill_(1)
    call.act()
    wrong = bool((call.taken != call.expected).any())
    call.given.zero_()  # sums of ones would grow
    quick = min(_timed(call.act, device) for _ in range(2))
    repetitions = max(FEWEST, min(MOST, int(MEASURE_SECONDS / float(mesh.max(torch.tensor(quick))))))
    slowest, any_wrong = mesh.max(
        torch.tensor([median(_timed(call.act, device) for _ in range(repetitions)), wrong])
    ).tolist()
    return slowest, not any_wrong


def _timed(act: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    if device == "cuda":
        torch.cuda.synchronize()
    return max(time.perf_counter() - began, 1e-9)


def _who(mesh: Mesh) -> dict[str, Any]:
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    node = int(os.environ.get("GROUP_RANK", 0))
    return {"rank": mesh.rank, "host": socket.gethostname(), "node": node, "device": device, "versions": versions()}
