"""What goes wrong with NCCL, simulated on the CPU by a process group of the tests: whoever is the cause is named, and nobody waits longer than he must."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from launching import plan_of

from dtrain import failure
from dtrain.launcher import process
from dtrain.launcher.book import Book
from dtrain.launcher.server import Server

DEADLINE = 60.0
"""Far from the 600 s for which collectives wait where `timeout` is not said."""


def ran(place: Path, *words: str, restarts: int = 0) -> dict[str, Any]:
    """What failure.json would hold, of a run under a server that is forked from this process, which holds torch."""
    scratch = place / f"{place.name}-scratch"
    scratch.mkdir()
    plan = plan_of(
        place / "out", "backend._target_=nccl_like.NcclLike", "trust=[launching,nccl_like]", "strategy=ddp", "launcher=local", "steps=6", *words
    )
    told: dict[str, Any] = {"restarts": restarts, "silence": 15, "wait": 60, "address": None, "here": plan.nodes}
    pid, deadline = process.fork(lambda: Server(plan, scratch, Book.read(scratch), **told).run()), time.monotonic() + DEADLINE
    try:
        while not (scratch / "over.json").exists():
            assert time.monotonic() < deadline, f"the run was not over within {DEADLINE:.0f} s"
            time.sleep(0.05)
        return failure.explain(max(scratch.glob("round-*"))).facts
    finally:
        process.kill(pid)
        shutil.rmtree(process.memory(scratch), ignore_errors=True)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("fault", ["raises", "raises_and_hangs"])
def test_an_error_ends_the_run_at_once_though_the_groups_cannot_be_destroyed(fault: str, devices: int, tmp_path: Path) -> None:
    facts = ran(tmp_path, f"devices={devices}", f"backend.fault={fault}", "backend.timeout=600")
    assert (facts["rank"], facts["kind"], facts["error"]) == (1, "error", "ValueError: planned")
