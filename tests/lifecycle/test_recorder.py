"""The flight recorder: dumps as torch makes them, what is told of them, and what a rank leaves of its own."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lifecycle.test_watchdog import world_timeout
from pool import ranks
from small import mesh_of
from until import until

from dtrain.backend.nccl import Nccl
from dtrain.lifecycle import recorder
from dtrain.lifecycle.watchdog import Watchdog

NAMES = {"0": "the world", "7": "dp_shard of ranks 0,1"}


def entry(
    name: str,
    number: int,
    state: str = "completed",
    *,
    group: str = "0",
    p2p: bool = False,
    sizes: Any = ((3,),),
    **more: Any,
) -> dict[str, Any]:
    """As FlightRecorder's dump_json writes it, version 2.10."""
    return {
        "record_id": number, "pg_id": int(group), "process_group": [group, "default_pg"], "thread_name": "python", "thread_id": "140404334766976",
        "collective_seq_id": 0 if p2p else number, "p2p_seq_id": number if p2p else 0, "op_id": number, "profiling_name": f"nccl:{name}",
        "time_created_ns": 1795422559709150041, "input_sizes": [list(size) for size in sizes], "input_dtypes": ["Float"] * len(sizes),
        "output_sizes": [list(size) for size in sizes], "output_dtypes": ["Float"] * len(sizes), "state": state,
        "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": state == "completed", "timeout_ms": 600000, "is_p2p": p2p,
    } | more  # fmt: skip


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    config = {name: {"name": name, "desc": "default_pg", "ranks": "[0, 1]"} for name in NAMES}
    status = {"0": {"last_enqueued_collective": "9", "last_started_collective": "-1", "last_completed_collective": "7"}}
    return {
        "version": "2.10",
        "comm_lib_version": "2.27.5",
        "pg_config": config,
        "pg_status": status,
        "nccl_comm_state": {},
        "entries": list(entries),
    }


def calls_of(*entries: dict[str, Any]) -> dict[str, list[tuple[str, int, str]]]:
    groups = recorder.read(dump(*entries), NAMES)
    return {name: [(call["call"], call["number"], call["state"]) for call in calls] for name, calls in groups.items()}


def test_of_each_group_the_last_that_are_over_and_the_first_that_are_not_are_told() -> None:
    over = [entry("all_reduce", number) for number in range(1, 1001)]
    still = [entry("_all_gather_base", number, "scheduled") for number in range(1001, 1900)]
    groups = calls_of(*over, *still, entry("broadcast", 4, "started", group="7"), entry("all_reduce", 1, group="9"))
    assert groups == {
        "the world": [
            ("all_reduce", 999, "completed"),
            ("all_reduce", 1000, "completed"),
            *[("all_gather", 1001 + n, "scheduled") for n in range(6)],
        ],
        "dp_shard of ranks 0,1": [("broadcast", 4, "started")],
    }, "a group that nobody knows any more is not told"


def test_calls_that_are_one_kernel_are_told_as_one_in_the_state_of_the_kernel() -> None:
    together = [entry("_reduce_scatter_base", 5, "scheduled", sizes=[(size,)]) for size in (8, 16)]
    assert calls_of(*together, entry("coalesced", 5)) == {"the world": [("reduce_scatter", 5, "completed")]}
    assert calls_of(*together, entry("coalesced", 5, "scheduled")) == {
        "the world": [("reduce_scatter", 5, "scheduled")]
    }
    assert calls_of(entry("send 0->1", 5, "scheduled", p2p=True), entry("all_reduce", 5))["the world"] == [
        ("all_reduce", 5, "completed"), ("send 0->1", 5, "scheduled"),
    ], "numbers of calls between two are others"  # fmt: skip


def test_what_is_told_is_bounded() -> None:
    names = {str(group): f"group {group}" for group in range(300)}
    entries = [
        entry("all_reduce" * 100, number, "scheduled", group=str(group), sizes=[(1,)] * 50)
        for group in range(300)
        for number in range(1, 20)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            recorder._distributed_c10d,
            "_dump_nccl_trace_json",
            lambda: json.dumps(dump(*entries)).encode(),
            raising=False,
        )
        assert len(json.dumps(recorder.calls(names))) < 40_000


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"entries": [{}]}', b'{"entries": 3}', RuntimeError("no NCCL")]
)
def test_a_dump_of_another_format_says_nothing(content: bytes | Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def dumped() -> bytes:
        if isinstance(content, Exception):
            raise content
        return content

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        monkeypatch.setattr(recorder._distributed_c10d, name, dumped, raising=False)
    assert recorder.calls(NAMES) == {}


def late(folder: Path) -> dict[str, Any]:
    """Rank 1 does not come to the all_reduce in which rank 0 waits in vain, and says then where it is."""
    with mesh_of(dp_replicate=2) as mesh:
        try:
            with Watchdog(mesh, str(folder), timeout=4.0, batch=8) as watchdog:
                for step in range(2):
                    watchdog.begin_step(step, 8 * step)
                    watchdog.pause_hang_detection()
                    mesh.barrier()
                until(lambda: world_timeout() == 4.0)  # before, gloo would wait longer than the watchdog
                mesh.sum(torch.zeros(1))
                if mesh.rank == 0:
                    mesh.sum(torch.zeros(1))
                until(lambda: [*folder.glob("failure-0-*.json")])
                return watchdog._now()
        except RuntimeError:
            (left,) = folder.glob("failure-0-*.json")
            return dict(json.loads(left.read_text()))


@pytest.mark.skipif(
    not hasattr(recorder._distributed_c10d, "_dump_fr_trace_json"),
    reason="torch before 2.13 may not record what gloo does",
)
def test_a_rank_that_times_out_leaves_what_it_called_and_so_does_one_that_is_asked(tmp_path: Path) -> None:
    waited, asked = ranks(2, late, tmp_path)
    numbers = [[(call["call"], call["number"]) for call in left["calls"]["the world"]] for left in (waited, asked)]
    assert waited["kind"] == "timeout"
    # gloo's own timeout may come before this dump: then all_reduce 4 counts as over, and one call fewer is told
    assert numbers[0][-2:] == [("all_reduce", 3), ("all_reduce", 4)]
    assert numbers[1] == [("barrier", 2), ("all_reduce", 3)]


def test_calls_are_recorded_where_nccl_is_used_unless_the_environment_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(device: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(torch.cuda, "set_device", begin)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    for variables, size in (
        ({}, "2000"),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, "0"),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "50"}, None),
    ):
        for name in recorder.SIZE:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConnectionError):
            Nccl(timeout=5, connect="use", segments="fixed", cores="any", kernels="fast").open()
        assert os.environ.get("TORCH_FR_BUFFER_SIZE") == size
        monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    assert dist.is_available()
