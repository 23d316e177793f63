"""Agents and forked ranks, started as a user starts them: who failed, what survives, what is left behind."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from launching import mentioning, plan_of, started, steps_of, wait_for_step
from pool import ranks

from dtrain.build import build
from dtrain.lifecycle import signals


def finished(process: "subprocess.Popen[str]", seconds: float = 300) -> tuple[int, str]:
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


def assert_nothing_left(out: Path) -> None:
    """Every process of a run carries its scratch folder in its command line; the folder is empty afterwards."""
    scratch = out.with_name(f"{out.name}-scratch")
    deadline = time.monotonic() + 120
    while mentioning(str(scratch)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not mentioning(str(scratch))


def test_two_nodes_of_two_ranks_finish(tmp_path: Path) -> None:
    code, output = finished(started(tmp_path, "model=mlp", "nodes=2", "devices=2"))
    assert code == 0, output
    assert steps_of(tmp_path) == list(range(1, 13))
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_first_failing_rank_is_the_one_shown(nodes: int, tmp_path: Path) -> None:
    code, output = finished(
        started(tmp_path, "model._target_=launching.Raises", "model.rank=1", "devices=2", f"nodes={nodes}", "batch=8")
    )
    assert code == 1
    assert output.count("Traceback (most recent call last)") == 1
    assert "dtrain: rank 1 failed" in output
    assert output.count("\nValueError: planned") == 1
    assert_nothing_left(tmp_path)


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    code, output = finished(
        started(
            tmp_path,
            "model._target_=launching.Killed",
            "model.rank=1",
            "devices=2",
            "launcher=local",
            "launcher.restarts=0",
        )
    )
    assert code == 1
    assert "rank 1 was killed" in output
    assert "Traceback" not in output
    assert_nothing_left(tmp_path)


def test_a_restarted_group_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    words = ["model._target_=launching.Killed", "model.rank=1", "model.at=6", "devices=2"]
    code, output = finished(
        started(
            tmp_path, *words, "launcher=local", "launcher.restarts=1", "checkpoint.every=4", "checkpoint.mode=blocking"
        )
    )
    assert code == 0, output
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "started"] == [0, 4]
    assert steps_of(tmp_path) == list(range(1, 13))


@pytest.mark.often("2-130")
@pytest.mark.campaign("signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_one_signal_stops_with_a_checkpoint_and_the_words_go_on(number: int, code: int, tmp_path: Path) -> None:
    words = ["model._target_=launching.Slow", "model.rank=0", "devices=2", "steps=2000"]
    process = started(tmp_path, *words)
    wait_for_step(tmp_path, 3)
    process.send_signal(number)
    returned, output = finished(process)
    assert returned == code, output
    done = steps_of(tmp_path)[-1]
    assert 3 <= done < 2000
    assert_nothing_left(tmp_path)
    assert finished(started(tmp_path, *words, "steps=20", "devices=1"))[0] == 0
    assert steps_of(tmp_path) == list(range(1, max(done, 20) + 1))


@pytest.mark.campaign("signals")
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    process = started(
        tmp_path, "model._target_=launching.Slow", "model.rank=0", "devices=2", "steps=20000", "launcher=local"
    )
    wait_for_step(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    code, output = finished(process)
    assert code == 130
    assert "Traceback" not in output
    assert_nothing_left(tmp_path)


@pytest.mark.campaign("kills")
def test_killing_the_command_takes_everything_with_it(tmp_path: Path) -> None:
    process = started(
        tmp_path, "model._target_=launching.Slow", "model.rank=0", "devices=2", "nodes=2", "batch=8", "steps=20000"
    )
    wait_for_step(tmp_path, 2)
    process.kill()
    finished(process)
    assert_nothing_left(tmp_path)


def test_scratch_folders_do_not_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert finished(started(out, "model=mlp", "devices=2", "steps=2"))[0] == 0
    assert not list(out.with_name("out-scratch").iterdir())


def heard_by_a_thread(out: str) -> int:
    """The exit code of a launch that gets SIGTERM while its server is being started."""
    popen = subprocess.Popen

    def start(*arguments: Any, **more: Any) -> Any:
        process = popen(*arguments, **more)
        os.kill(os.getpid(), signal.SIGTERM)  # the launch holds signals back, but not in its other threads
        time.sleep(0.1)
        return process

    subprocess.Popen = start  # type: ignore[misc, assignment]
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    made = plan_of(Path(out), "devices=2", "launcher=local")
    try:
        build(made.launcher).launch(made)
    except signals.StopRequested as asked:
        return asked.exit_code
    return 0


def test_a_signal_that_another_thread_hears_is_not_lost(tmp_path: Path) -> None:
    assert ranks(1, heard_by_a_thread, str(tmp_path / "out")) == [75]
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
