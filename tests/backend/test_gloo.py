"""The process group of one rank: opened from the environment, closed again, without hanging."""

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from small import mesh_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from until import until

from dtrain.backend.gloo import Gloo
from dtrain.strategy.ddp import DDP


def alone() -> tuple[int, int, bool]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    with Gloo(timeout=30).open():
        place = dist.get_rank(), dist.get_world_size()
    return *place, dist.is_initialized()


def test_without_an_environment_it_is_one_rank() -> None:
    assert ranks(1, alone) == [(0, 1, False)]


def together() -> float:
    with Gloo(timeout=30).open():
        value = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(value)
        return value.item()


def test_ranks_meet_at_the_store_of_the_environment() -> None:
    assert ranks(3, together) == [6.0, 6.0, 6.0]


def restarted() -> list[float]:
    """The same store, as torchelastic keeps it, over three attempts."""
    values = []
    for attempt in range(3):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        values.append(together())
    return values


def test_a_restart_does_not_meet_the_keys_of_the_dead_attempt() -> None:
    assert ranks(2, restarted) == [[3.0] * 3] * 2


def again() -> list[float]:
    """Several groups after each other, as of a script that trains twice: over other connections, and not those of the first."""
    sums = []
    for size in (1, 1 << 20, 3):
        with Gloo(timeout=30).open():
            for _ in range(3):
                value = torch.full((size,), float(dist.get_rank() + 1))
                dist.all_reduce(value, group=dist.new_group())
                sums.append(value[-1].item())
    return sums


def test_ranks_that_part_meet_again() -> None:
    assert ranks(2, again) == [[3.0] * 9] * 2


def late(over: int, done: int) -> str:
    """Rank 1 does not come before rank 0 has its error."""
    together()  # ranks of a busy machine begin far apart; from here on they are side by side
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    with Gloo(timeout=5).open():
        if dist.get_rank() == 1:
            os.read(over, 1)
            return ""
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1))
        os.write(done, b"1")
        return str(caught.value)


def groups_of_another_layout(spare: int) -> float:
    """The root of a sum over the second axis of 2 x 2 ranks, whose group is the later the more `spare` ones were made before."""
    with Gloo(timeout=60).open():
        for _ in range(spare):
            dist.new_group()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sums = DTensor.from_local(torch.ones(1, 4), mesh, [Replicate(), Shard(0)]).sum()
        return float(sums.sqrt().full_tensor())  # needs the sums of both ranks


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def one_mesh_after_the_other() -> list[float]:
    """The roots; no mesh leaves more threads than the first."""
    roots, most = [], 0
    for spare in (5, 0, 3):
        roots.append(groups_of_another_layout(spare))
        gc.collect()
        most = most or threads()
        until(lambda limit=most: threads() <= limit, 10)
    return roots


def test_a_mesh_uses_no_group_of_an_earlier_one_and_keeps_none() -> None:
    for roots in ranks(4, one_mesh_after_the_other):
        assert roots == pytest.approx([8**0.5] * 3)


@pytest.mark.campaign("network")
def test_a_collective_that_never_completes_is_an_error() -> None:
    over, done = os.pipe()
    assert "Timed out waiting 5000ms" in ranks(2, late, over, done)[0]
    os.close(over)
    os.close(done)


def outlived() -> int:
    """As a run ends: the wrapper that holds the group is freed after the group was closed."""
    with mesh_of(dp_replicate=2) as mesh:
        strategy = DDP(bucket_mb=25)
        model = strategy.wrap(torch.nn.Linear(64, 64), mesh)
        for _ in range(3):
            with strategy.sync(model, True):
                model(torch.ones(2, 64)).sum().backward()
        mesh.sum(torch.ones(1000))
    del model
    return 1


def test_a_wrapper_may_outlive_the_group() -> None:
    """The destructor of a group waits for threads that may wait for the interpreter lock: whoever frees it must not hold that lock."""
    for _ in range(5):
        assert ranks(2, outlived) == [1, 1]
