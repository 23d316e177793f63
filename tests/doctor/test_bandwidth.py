"""What real ranks measure: every operation on every axis, right and plausible; by the formula of nccl-tests."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from small import on_mesh, plan

from dtrain.doctor import bandwidth
from dtrain.mesh import Mesh


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 1.75),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 2, 0.5),
        ("send_recv", 8, 1.0),
    ],
)
def test_the_bus_carries_what_nccl_tests_counts(operation: str, ranks: int, factor: float) -> None:
    assert bandwidth.FACTORS[operation](ranks) == factor


def test_two_ranks_measure_every_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "SIZES", {"gloo": (4096, 1 << 20)})
    first, second = ranks(2, bandwidth.measure, plan("devices=2", "strategy=ddp"))
    links = first.metrics["links"]
    assert links == second.metrics["links"]
    assert {(row["axis"], row["ranks"], row["operation"], row["bytes"]) for row in links} == {
        ("world", 2, name, size) for name in bandwidth.FACTORS for size in (4096, 1 << 20)
    }
    assert all(row["right"] and 1e2 < row["busbw"] < 1e12 for row in links)
    assert [(rank["rank"], rank["device"]) for rank in first.metrics["ranks"]] == [(0, "cpu"), (1, "cpu")]


def test_axes_that_are_longer_than_one_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "SIZES", {"gloo": (4096,)})

    def work(mesh: Mesh) -> list[tuple[str, int, bool]]:
        rows = [row for name, group in bandwidth.groups(mesh) for row in bandwidth.rows(mesh, name, group)]
        return list(dict.fromkeys((row["axis"], row["ranks"], row["right"]) for row in rows))

    assert set(map(tuple, on_mesh(work, dp_shard=2, tp=2))) == {
        (("world", 4, True), ("dp_shard", 2, True), ("tp", 2, True))
    }


def test_wrong_numbers_are_seen_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "SIZES", {"gloo": (4096,)})
    reduce = dist.all_reduce

    def broken(tensor: torch.Tensor, **more: Any) -> None:
        reduce(tensor, **more)
        if dist.get_rank() == 1 and tensor.numel() > 100:
            tensor[7] = 0.5

    def work(mesh: Mesh) -> dict[str, bool]:
        monkeypatch.setattr(dist, "all_reduce", broken)
        return {row["operation"]: row["right"] for row in bandwidth.rows(mesh, "world", dist.group.WORLD)}

    for seen in on_mesh(work, dp_shard=2):
        assert seen == {"all_reduce": False, "all_gather": True, "reduce_scatter": True, "send_recv": True}
