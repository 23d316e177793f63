"""What the ranks of an mpirun do for the tests of backend=mpi:

mpirun -np 4 python tests/integrations/mpi/ranks.py <what> <folder>

The place of each is that of its launcher, and they meet by a file of the folder.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from invariance.layouts import MODELS
from invariance.run import COMMON, _steps
from small import plan

from dtrain.cluster.allocation import adopt, external
from dtrain.integrations.mpi.backend import Mpi
from dtrain.launcher.meeting import meeting
from dtrain.mesh import Mesh

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
LAYOUTS = (
    ("gpt", "strategy=ddp devices=4"),
    ("gpt", "strategy=zero1 devices=4 accumulate=2"),
    ("gpt", "strategy=zero2 devices=4 accumulate=2"),
    ("gpt", "strategy=zero3 devices=4"),
    ("gpt", "strategy=fsdp devices=4"),
    ("gpt", "strategy=hsdp devices=4"),
    ("gpt", "devices=4 strategy=fsdp mesh.tp=2"),
    ("gpt", "devices=4 strategy=fsdp mesh.pp=2"),
    ("gpt", "devices=4 strategy=fsdp mesh.cp=2"),
    ("moe", "strategy=fsdp devices=4 mesh.ep=2"),
    ("cnn", "strategy=fsdp devices=4"),
)


def collectives(folder: Path) -> None:
    """Every operation on every type, each against its definition."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in TYPES:
        _sums(rank, world, dtype)
        _moves(rank, world, dtype)
    _refused(rank, world)
    _messages(rank, world)
    _groups(rank, world)


def _sums(rank: int, world: int, dtype: torch.dtype) -> None:
    others = world * (world - 1) // 2
    x = torch.arange(5).to(dtype) + rank
    dist.all_reduce(x)
    assert x.tolist() == [world * i + others for i in range(5)], dtype
    matrix = torch.zeros(4, 4, dtype=dtype)
    matrix[:, 1] += rank
    dist.all_reduce(matrix[:, 1], op=dist.ReduceOp.MAX)  # not contiguous
    assert matrix.sum() == 4 * (world - 1)
    x = torch.full((3,), rank).to(dtype)
    dist.reduce(x, dst=1)
    assert rank != 1 or x.tolist() == [others] * 3
    part = torch.empty(3, dtype=dtype)
    dist.reduce_scatter_single(part, torch.arange(3 * world).to(dtype))
    assert part.tolist() == [world * (3 * rank + i) for i in range(3)]
    part = torch.empty(2, dtype=dtype)
    dist.reduce_scatter(part, [torch.full((2,), i).to(dtype) for i in range(world)])
    assert part.tolist() == [world * rank] * 2
    if dtype.is_floating_point:
        x = torch.full((2,), rank + 1).to(dtype)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        assert x.tolist() == [(world + 1) / 2] * 2


def _moves(rank: int, world: int, dtype: torch.dtype) -> None:
    def filled(value: int, count: int = 2) -> torch.Tensor:
        return torch.full((count,), value).to(dtype)

    x = filled(rank)
    dist.broadcast(x, src=world - 1)
    assert x.tolist() == [world - 1] * 2
    whole = torch.empty(2 * world, dtype=dtype)
    dist.all_gather_single(whole, filled(rank))
    assert whole.tolist() == [i for i in range(world) for _ in range(2)]
    parts = [torch.empty(2, dtype=dtype) for _ in range(world)]
    dist.all_gather(parts, filled(rank))
    assert [part[1].item() for part in parts] == [*range(world)]
    dist.gather(filled(rank), parts if rank == 0 else None, dst=0)
    x = torch.empty(2, dtype=dtype)
    dist.scatter(x, [filled(i) for i in range(world)] if rank == 0 else None, src=0)
    assert x.tolist() == [rank] * 2
    out, rows = torch.empty(world * (rank + 1), 2, dtype=dtype), [i + 1 for i in range(world)]
    sent = filled(rank, 2 * sum(rows)).view(-1, 2)
    dist.all_to_all_single(out, sent, [rank + 1] * world, rows)
    assert out[:, 0].tolist() == [i for i in range(world) for _ in range(rank + 1)]
    parts = [torch.empty(1, dtype=dtype) for _ in range(world)]
    dist.all_to_all(parts, [filled(10 * rank + i, 1) for i in range(world)])
    assert [part.item() for part in parts] == [10 * i + rank for i in range(world)]


def _refused(rank: int, world: int) -> None:
    """What does not fit is an error on every rank, before MPI reads or writes beyond a tensor; the group goes on."""

    def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(count, dtype=dtype)

    wide = torch.float64
    root = rank == 0
    wrong: tuple[Callable[[], Any], ...] = (
        lambda: dist.all_gather_single(ones(world), ones(100_000)),
        lambda: dist.all_gather_single(ones(20 * world), ones(10)),
        lambda: dist.all_gather_single(ones(world, wide), ones(1)),
        lambda: dist.all_gather([ones(7)] * world, ones(3)),
        lambda: dist.all_gather([ones(3)] * (world - 1) + [ones(4)], ones(3)),
        lambda: dist.all_gather([ones(3)] * (world - 1) + [ones(3, wide)], ones(3)),
        lambda: dist.reduce_scatter_single(ones(100_000), ones(world)),
        lambda: dist.reduce_scatter_single(ones(2), ones(5 * world)),
        lambda: dist.reduce_scatter_single(ones(2, wide), ones(2 * world)),
        lambda: dist.reduce_scatter(ones(2), [ones(2)] * (world - 1) + [ones(3)]),
        lambda: dist.reduce_scatter(ones(2), [ones(2)] * (world - 1)),
        lambda: dist.all_to_all_single(ones(4), ones(50 * world), [2] * world, [50] * world),
        lambda: dist.all_to_all_single(ones(2 * world), ones(2 * world), [2] * world, [1] * world),
        lambda: dist.all_to_all_single(ones(world + 1), ones(world + 1)),
        lambda: dist.all_to_all_single(ones(world, wide), ones(world)),
        lambda: dist.all_to_all([ones(1)] * (world - 1), [ones(1)] * world),
        lambda: dist.all_reduce(ones(2, torch.int64), op=dist.ReduceOp.AVG),
        lambda: dist.all_reduce(ones(2, torch.bool), op=dist.ReduceOp.AVG),
        lambda: dist.all_reduce(ones(2), op=dist._make_nccl_premul_sum(2.0)),
        lambda: root and dist.gather(ones(3), [ones(2)] * world, dst=0),
        lambda: root and dist.gather(ones(3), [ones(3)] * (world - 1) + [ones(3, wide)], dst=0),
        lambda: root and dist.scatter(ones(3), [ones(3)] * (world - 1) + [ones(4)], src=0),
    )
    for number, act in enumerate(wrong):
        try:
            assert not act() and number >= len(wrong) - 3 and not root, number
        except (RuntimeError, ValueError, TypeError) as error:
            assert "object at" not in str(error), error
    dist.barrier()


def apart(folder: Path) -> None:
    """The ranks disagree about how much one sends to the other."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sent = [2] * world if rank else [2, *[1] * (world - 1)]
    try:
        dist.all_to_all_single(torch.zeros(2 * world), torch.ones(sum(sent)), [2] * world, sent)
    except RuntimeError as error:
        (folder / f"apart-{rank}.json").write_text(json.dumps({"error": str(error)}))
        raise


def _messages(rank: int, world: int) -> None:
    """All send before any receives, more than a library keeps for itself."""
    sent, received = torch.full((1 << 18,), float(rank)), torch.empty(1 << 18)
    after, before = (rank + 1) % world, (rank - 1) % world
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]):
        work.wait()
    assert received[-1] == before
    works = [dist.all_reduce(sent, async_op=True) for _ in range(3)]  # one after the other
    for work in works:
        work.wait()
    assert sent[0] == world * (world - 1) // 2 * world**2


def _groups(rank: int, world: int) -> None:
    mine = [i for i in range(world) if i % 2 == rank % 2]
    groups = [dist.new_group([i for i in range(world) if i % 2 == half]) for half in range(2)]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=groups[rank % 2])
    assert x.item() == sum(mine)
    dist.broadcast(x, src=mine[-1], group=groups[rank % 2])


def layouts(folder: Path) -> None:
    """Three steps of each layout; what this rank holds of it goes to <folder>/<number>-<rank>.pt."""
    for number, (model, words) in enumerate(LAYOUTS):
        asked = plan(*MODELS[model].split(), *COMMON.split(), *words.split())
        told = _steps(asked, Mesh(asked.mesh, device="cpu"), 3)
        torch.save(told, folder / f"{number}-{dist.get_rank()}.pt")


def late(folder: Path) -> None:
    """Rank 1 does not come, and the others say so within their timeout."""
    if dist.get_rank() == 1:
        time.sleep(60)
    begun = time.monotonic()
    try:
        dist.all_reduce(torch.ones(8))
    except RuntimeError as error:
        facts = {"error": str(error), "seconds": time.monotonic() - begun}
        (folder / f"late-{dist.get_rank()}.json").write_text(json.dumps(facts))
        raise


DO: dict[str, tuple[float, Callable[[Path], Any]]] = {
    "collectives": (30, collectives), "layouts": (60, layouts), "late": (3, late), "apart": (10, apart)
}  # fmt: skip


def main(what: str, folder: Path) -> None:
    torch.set_num_threads(1)
    place = external(os.environ)
    assert place and place.row.name in ("Open MPI", "MPICH")
    seconds, act = DO[what]
    with meeting(str(folder), place, on_one_host=True, wait=60) as (host, port):
        adopt(os.environ, place, local_world=place.world)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        with Mpi(timeout=seconds).open():
            act(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
