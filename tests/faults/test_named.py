"""Every fault, planted on one of two ranks of a real run: that rank is named, in one paragraph, and failure.json says the same."""

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import COMMAND
from launching import started, wait_for_step

ANYWHERE = ["model._target_=faulty.Faulty", "trust=[launching,faulty]", "backend=gloo", "backend.timeout=8"]
WORDS = [*ANYWHERE, "devices=2", "launcher=local", "launcher.restarts=0"]

FAULTS: dict[str, tuple[str, str, str]] = {
    "workload_exc": (
        "error",
        "rank 1 failed in step 4 (positions 24 to 31 of the order, microbatch 0): ValueError: planned",
        "in workload_exc",
    ),
    "async_exc": (
        "error",
        "rank 1 failed in step 4 (positions 24 to 31 of the order, microbatch 0): ValueError",
        "in async_exc",
    ),
    "signal_exc": (
        "error",
        "rank 1 failed in step 4 (positions 24 to 31 of the order, microbatch 0): ValueError: planned in a handler",
        "in fail",
    ),
    "interrupt": (
        "error",
        "rank 1 failed in step 4 (positions 24 to 31 of the order, microbatch 0): KeyboardInterrupt",
        "in interrupt",
    ),
    "os_abort": ("killed", "rank 1 aborted in step 4 (positions 24 to 31 of the order): SIGABRT", "in os_abort"),
    "segfault": ("killed", "rank 1 crashed in step 4 (positions 24 to 31 of the order): SIGSEGV", "in segfault"),
    "sigkill": ("killed", "rank 1 was killed in step 4 (positions 24 to 31 of the order): SIGKILL", ""),
    "exit_0": (
        "exited",
        "rank 1 left in step 4 (positions 24 to 31 of the order): with exit code 0 before the run was done",
        "",
    ),
    "exit_7": ("exited", "rank 1 ended in step 4 (positions 24 to 31 of the order): with exit code 7", ""),
    "sleep": (
        "hung",
        "rank 1 hung in step 4 (positions 24 to 31 of the order, microbatch 0): it never reached collective",
        "in sleep",
    ),
    "lock_gil": ("hung", "rank 1 hung in step 4 (positions 24 to 31 of the order): it did not respond", "in lock_gil"),
    "sigstop": ("hung", "rank 1 was stopped in step 4 (positions 24 to 31 of the order): SIGSTOP", ""),
}
"""fault: kind, how the paragraph begins, where it was"""
QUICK = ("workload_exc", "sigkill")


def ran(out: Path, *more: str, words: Sequence[str] = WORDS) -> tuple[int, str]:
    process = started(out, *words, *more)
    try:
        output, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, output


@pytest.mark.parametrize(
    "fault",
    [*QUICK, *(pytest.param(each, marks=pytest.mark.campaign("kills")) for each in FAULTS if each not in QUICK)],
)
def test_the_right_rank_is_named(fault: str, tmp_path: Path) -> None:
    kind, line, where = FAULTS[fault]
    code, output = ran(tmp_path, f"model.fault={fault}")
    assert code == 1, output
    paragraph = [text for text in output.splitlines() if text.startswith("dtrain: ")]
    assert len(paragraph) == 1, output
    assert paragraph[0].startswith(f"dtrain: {line}"), output
    assert where in paragraph[0]
    assert "Meanwhile: rank 0 " in paragraph[0]
    assert output.count("Traceback (most recent call last)") == (kind == "error")
    facts = json.loads((tmp_path / "failure.json").read_text())
    assert (facts["rank"], facts["kind"], facts["step"], facts["samples"]) == (1, kind, 4, [24, 31])
    assert facts["pid"] > 0
    assert "paragraph" not in facts
    assert facts["message"].startswith(line)
    assert [rank["rank"] for rank in facts["ranks"]] == [0, 1]
    assert facts["ranks"][0]["groups"]["the world"] > 0


@pytest.mark.often("sigterm-75")
@pytest.mark.campaign("signals")
@pytest.mark.parametrize(("fault", "code"), [("sigterm", 75), ("sigint", 130)])
def test_a_wish_of_one_rank_is_everybodys_and_its_rank_is_named(fault: str, code: int, tmp_path: Path) -> None:
    returned, output = ran(tmp_path, f"model.fault={fault}", "steps=100000")
    assert returned == code, output
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    assert result["reason"] == f"{fault.upper()} to rank 1"
    assert 4 <= result["step"] < 100000
    assert list(tmp_path.glob("checkpoints/*/*/COMMIT.json"))


@pytest.mark.campaign("signals")
def test_a_single_process_that_hangs_says_so_itself(tmp_path: Path) -> None:
    code, output = ran(tmp_path, "model.fault=sleep", "model.rank=0", words=[*ANYWHERE, "backend.timeout=4"])
    assert code == 1
    assert "dtrain: rank 0 hung in step 4 (positions 24 to 31 of the order, microbatch 0): no progress for" in output
    assert "in sleep" in output
    assert json.loads((tmp_path / "failure.json").read_text())["kind"] == "hung"


@pytest.mark.campaign("signals")
def test_a_single_process_in_which_code_raises_an_interrupt_says_where(tmp_path: Path) -> None:
    """Nobody pressed Ctrl-C: it is no wish to stop."""
    code, output = ran(tmp_path, "model.fault=interrupt", "model.rank=0", words=ANYWHERE)
    assert code == 1
    assert (
        "dtrain: rank 0 failed in step 4 (positions 24 to 31 of the order, microbatch 0): KeyboardInterrupt, at faulty.py:"
        in output
    )
    assert json.loads((tmp_path / "failure.json").read_text())["kind"] == "error"


@pytest.mark.campaign("kills")
def test_a_single_process_that_leaves_is_told_at_the_next_start(tmp_path: Path) -> None:
    """`os._exit(0)` leaves no time to say so at once."""
    code, output = ran(tmp_path, "model.fault=exit_0", "model.rank=0", words=ANYWHERE)
    assert (code, (tmp_path / "result.json").exists()) == (0, False)
    code, output = ran(tmp_path, "model.fault=exit_0", "model.rank=9", words=ANYWHERE)
    assert code == 0 and "it ended without giving it back" in output
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "finished"


@pytest.mark.campaign("kills")
def test_under_torchrun_the_rank_that_failed_is_named(tmp_path: Path) -> None:
    torchrun = [COMMAND[0], "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "dtrain"]
    process = started(tmp_path, *ANYWHERE, "model.fault=workload_exc", by=torchrun)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert (
        output.count(
            "dtrain: rank 1 failed in step 4 (positions 24 to 31 of the order, microbatch 0): ValueError: planned"
        )
        == 1
    ), output
    facts = json.loads((tmp_path / "failure.json").read_text())
    assert (facts["rank"], facts["error"]) == (1, "ValueError: planned")


@pytest.mark.campaign("signals")
def test_a_preempted_run_is_no_failure(tmp_path: Path) -> None:
    process = started(tmp_path, *WORDS, "model.fault=exit_7", "model.at=100000", "steps=100000")
    wait_for_step(tmp_path, 2)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 75, output
    assert not (tmp_path / "failure.json").exists()
