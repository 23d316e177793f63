"""Loop that measures collectives over the mesh axes of a plan instead of training: `Plan -> Result`.

Bus bandwidth is defined as in nccl-tests, so that figures compare with published ones, and with the speed of the wire,
for any number of ranks: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
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
"""Bytes of a message; the smallest shows the latency."""
FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
}
"""Operation -> factor for n ranks: bus bandwidth = bytes / seconds x factor. `bytes`: of the whole tensor."""
# torch 2.13 deprecates the old names
GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
MEASURE_SECONDS, FEWEST, MOST = 0.06, 3, 50
"""Time per figure, and limits of its repetitions."""


def measure(plan: Plan) -> Result:
    """Measure. `metrics` are the same on every rank: `links`, a row per axis, size and operation; `ranks`, facts about
    each rank.
    """
    began = time.perf_counter()
    with build(plan.backend).open():
        mesh = Mesh(plan.mesh, device=plan.device)
        ranks = mesh.gather(_who(mesh))
        mesh.barrier()
        for facts, now in zip(ranks, mesh.gather(time.time()), strict=True):
            facts["clock"] = now
        links = [row for name, group in groups(mesh) for row in rows(mesh, name, group)]
        return Result(
            status="finished",
            step=0,
            loss=None,
            wall_seconds=time.perf_counter() - began,
            metrics={"links": links, "ranks": ranks},
            versions=versions(),
        )


def groups(mesh: Mesh) -> Iterator[tuple[str, Any]]:
    """(name, this rank's group) of the world and of each axis larger than 1, except one that spans the world. All ranks
    create them in this order.
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
    """Figures of the slowest rank while all groups of an axis communicate at the same time, as in training. `right`:
    whether every rank received the right numbers.
    """
    figures = []
    count = dist.get_world_size(group)
    for backend, device in (("nccl", "cuda"), ("gloo", "cpu")):
        if device != mesh.device.type and (device == "cuda" or name != "world"):
            continue
        for operation, size in product(FACTORS, SIZES[backend]):
            numbers = size // 4 // count * count
            call = call_of(operation, numbers, count, group, mesh.device if device == "cuda" else torch.device("cpu"))
            seconds, right = _measured(mesh, call, device)
            busbw = 4 * numbers / seconds * FACTORS[operation](count)
            row = {"axis": name, "ranks": count, "backend": backend, "operation": operation, "bytes": 4 * numbers}
            figures.append({**row, "seconds": seconds, "busbw": busbw, "right": right})
    return figures


@dataclass(frozen=True)
class Call:
    """`act` sends `given` and fills `taken`: with `expected` if `given` is all ones."""

    act: Callable[[], object]
    given: Tensor
    taken: Tensor
    expected: float


def call_of(operation: str, numbers: int, count: int, group: Any, device: torch.device) -> Call:
    """An operation of `count` ranks on `numbers` fp32 numbers in total."""
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
    """(median seconds of a call on the slowest rank, whether the first call gave right numbers on all ranks). The first
    call sets up connections and is not timed.
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
