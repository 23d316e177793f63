"""What goes wrong with NCCL, simulated on the CPU by a process group of the tests: whoever is the cause is named, and nobody waits longer than he must."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from launching import plan_of

from dtrain.launcher import process
from dtrain.launcher.local.restarts import RestartLog
from dtrain.launcher.local.rounds import Rounds
from dtrain.lifecycle import failure, kernel_log

DEADLINE = 60.0
"""Far from the 600 s for which collectives wait where `timeout` is not said."""


def last_round(place: Path, *words: str, restarts: int = 0) -> Path:
    """What the ranks left, of a run under a server that is forked from this process, which holds torch."""
    scratch = place / f"{place.name}-scratch"
    scratch.mkdir()
    plan = plan_of(
        place / "out",
        "backend._target_=nccl_like.NcclLike",
        "trust=[launching,nccl_like]",
        "strategy=ddp",
        "launcher=local",
        "steps=6",
        *words,
    )
    told: dict[str, Any] = {"restarts": restarts, "silence": 15, "wait": 60, "address": None, "here": plan.nodes}
    pid, deadline = (
        process.fork(lambda: Rounds(plan, scratch, RestartLog.read(scratch), **told).run()),
        time.monotonic() + DEADLINE,
    )
    try:
        while not (scratch / "over.json").exists():
            assert time.monotonic() < deadline, f"the run was not over within {DEADLINE:.0f} s"
            time.sleep(0.05)
        return max(scratch.glob("round-*"))
    finally:
        process.kill(pid)
        shutil.rmtree(process.memory(scratch), ignore_errors=True)


def ran(place: Path, *words: str) -> dict[str, Any]:
    """What failure.json would hold."""
    return failure.explain(last_round(place, *words)).facts


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("fault", ["raises", "raises_and_hangs"])
def test_an_error_ends_the_run_at_once_though_the_groups_cannot_be_destroyed(
    fault: str, devices: int, tmp_path: Path
) -> None:
    facts = ran(tmp_path, f"devices={devices}", f"backend.fault={fault}", "backend.timeout=600")
    assert (facts["rank"], facts["kind"], facts["error"]) == (1, "error", "ValueError: planned")


CASES: dict[str, tuple[str, str]] = {
    "raises": ("error", "rank 1 failed"),
    "late": ("hung", "rank 1 hung"),
    "calls_another": ("hung", "it calls broadcast as collective"),
    "aborts_who_waits": ("hung", "rank 1 hung"),
    "aborts_all_who_wait": ("hung", "rank 1 hung"),
    "unhandled_cuda_error": ("error", "rank 1 failed"),
    "broken_memory": (
        "gpu",
        "GPU 1: AcceleratorError: CUDA error: uncorrectable ECC error encountered (its memory is broken (ECC))",
    ),
    "driver_reports": (
        "gpu",
        "(Xid 119 of the GPU at 0000:01:00: its system processor (GSP) did not answer the driver; the GPU's fault, not the program's)",
    ),
    "off_the_bus": ("gpu", "GPU 1: RuntimeError: CUDA error: unknown error (the host no longer reaches it)"),
    "out_of_memory": ("error", "the GPU's memory is full: type a smaller microbatch=, or remat=full"),
    "device_assert": ("error", "CUDA_LAUNCH_BLOCKING=1 shows which"),
    "killed": ("killed", "rank 1 was killed"),
    "aborted_by_itself": ("killed", "rank 1 aborted"),
    "others_lose_it": ("error", "ValueError: planned"),
}
"""fault: kind, and what is said of rank 1"""


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("fault", CASES)
def test_what_goes_wrong_with_nccl_is_blamed_on_the_rank_that_is_the_cause(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, said = CASES[fault]
    monkeypatch.setattr(kernel_log, "KMSG", tmp_path / "kmsg")
    kernel_log.KMSG.touch()
    facts = ran(tmp_path, "devices=4", f"backend.fault={fault}", "backend.timeout=6", "backend.at=30")
    assert (facts["rank"], facts["kind"]) == (1, kind), facts["message"]
    assert said in facts["message"]


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("function", ["flush", "save"])
def test_who_waits_between_two_steps_ends_too(function: str, tmp_path: Path) -> None:
    words = [
        "backend.fault=late",
        "backend.timeout=6",
        f"backend.inside={function}",
        "backend.at=2",
        "checkpoint.every=1",
    ]
    facts = ran(tmp_path, "devices=2", *words)
    assert (facts["rank"], facts["kind"], facts["samples"]) == (1, "hung", None), facts["message"]
    assert facts["error"].startswith("it never reached collective")


@pytest.mark.campaign("kills")
def test_a_node_with_a_broken_gpu_is_left_out_where_fewer_are_allowed(tmp_path: Path) -> None:
    left = last_round(
        tmp_path,
        "nodes=1:2",
        "devices=1",
        "backend.fault=broken_memory",
        "backend.timeout=60",
        "backend.at=14",
        restarts=1,
    )
    assert left.name == "round-1"
    assert json.loads((left / "result.json").read_text())["status"] == "finished"
    assert [path.name for path in left.glob("began-*")] == ["began-0.json"]
