"""SIGSTOP to each process of a run: noticed within a bound, named, and the run goes on from its last state."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from killing import family, nothing_left
from launching import started, steps_of, wait_for_step

pytestmark = pytest.mark.campaign("signals")

WORDS = [
    "model._target_=launching.Slow",
    "model.rank=0",
    "devices=2",
    "batch=8",
    "steps=120",
    "checkpoint.every=5",
    "launcher=local",
]
FROZEN = {
    "store": "the store process (pid {pid}) was stopped (SIGSTOP) for 8 s",
    "agent": "node 0 (this host) was lost: no sign of life for 8 s",
    "server": "the launcher's server (pid {pid}) was stopped (SIGSTOP) for 8 s",
    "rank": "was stopped in step",
}
"""process: what is said of it"""


def freeze(command: int, target: str) -> int:
    deadline = time.monotonic() + 120
    while not (living := family(command)[target]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(living[-1], signal.SIGSTOP)
    return living[-1]


@pytest.mark.often("agent", "rank")
@pytest.mark.parametrize("target", FROZEN)
def test_a_frozen_process_is_named_and_replaced(target: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = started(out, *WORDS, "launcher.silence=8", "backend=gloo", "backend.timeout=15")
    wait_for_step(out, 6)
    pid = freeze(process.pid, target)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert FROZEN[target].format(pid=pid) in output
    assert steps_of(out) == list(range(1, 121))
    assert nothing_left(out)


@pytest.mark.often("rank")
@pytest.mark.parametrize("target", ["store", "rank"])
def test_sigterm_gets_through_to_a_run_of_which_a_process_is_frozen(target: str, tmp_path: Path) -> None:
    """With a rank that does, the other is in a collective with it."""
    out = tmp_path / "out"
    process = started(out, *WORDS, "steps=4000", "launcher.silence=8")
    wait_for_step(out, 6)
    freeze(process.pid, target)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 75, output
    assert "Traceback" not in output
    assert nothing_left(out)
    assert not (out / "failure.json").exists() or json.loads((out / "failure.json").read_text())["kind"] == "lost"
