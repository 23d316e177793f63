"""`dtrain sweep stop` and `retry`: every worker saves and ends; what failed is run again, and nothing else."""

import json
import subprocess
import time
from pathlib import Path

import commands
import pytest
from commands import COMMAND, Forked

from dtrain.errors import StoreError, WordsError
from dtrain.sweep import folder, stop_request
from dtrain.sweep.folder import Job
from dtrain.verb import sweep

SMALL = ["model=mlp", "data=synthetic", "data.samples=64", "objective=regression", "hook=[]", "logger=[]"]
TROUBLE = ["model._target_=sweeping.Trouble", "trust=[sweeping]", "data=synthetic", "data.inputs=[16]", "data.samples=64",
           "objective=classification", "steps=4", "hook=[]", "logger=[]"]  # fmt: skip


def test_a_request_is_newer_than_all_before_it_and_other_files_are_none(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert stop_request.newest(root) == 0
    stop_request.ask(root)
    stop_request.ask(root)
    for name in ("x.json", "7.json", "00009.json.new", "99999999999999.json"):
        (tmp_path / "stop" / name).write_text("")
    assert stop_request.newest(root) == 2
    assert set(json.loads((tmp_path / "stop" / "00002.json").read_text())) == {"host", "pid", "time"}


def test_only_a_sweep_can_be_asked(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no sweep\.yaml"):
        sweep.run(["stop", str(tmp_path)])
    for words in (["stop"], ["stop", "a", "b"], ["halt", "a"]):
        with pytest.raises(WordsError, match="type dtrain sweep <work, ls, best, why, retry, stop>"):
            sweep.run(words)


def test_a_loss_of_any_size_is_a_result_and_a_failure_after_a_stop_is_a_failure(tmp_path: Path) -> None:
    for name, status, loss, failed in (
        ("a", "finished", 1e30, False),
        ("b", "spiked", 1e30, False),
        ("c", "interrupted", 1.0, True),
        ("d", "interrupted", 1.0, False),
    ):
        (tmp_path / name).mkdir()
        result = {"status": status, "step": 3, "loss": loss, "wall_seconds": 1.0, "reason": "because"}
        (tmp_path / name / "result.json").write_text(json.dumps(result))
        if failed:
            (tmp_path / name / "failure.json").write_text('{"error": "ValueError: planned"}')
    states = folder.states(str(tmp_path), [Job({}, (), name) for name in "abcd"])
    assert {name: state.status for name, state in states.items()} == {
        "a": "finished",
        "b": "failed",
        "c": "failed",
        "d": "stopped",
    }


def test_what_failed_is_told_by_cause_and_run_again(tmp_path: Path) -> None:
    words = [*TROUBLE, f"model.once={tmp_path}/once", "model.how=raises,none", "sweep.out=s"]
    assert commands.run("-m", *words, cwd=tmp_path).returncode == 1
    why = commands.run("sweep", "why", "s", cwd=tmp_path).stdout.splitlines()
    failed = next(path.parent.name for path in (tmp_path / "s").glob("*/failure.json"))
    assert why[0].startswith("1 x ValueError: planned") and why[1:] == [f"    {failed}", "1 of 2 jobs have failed"]
    finished = next(path.parent.name for path in (tmp_path / "s").glob("*/result.json"))
    other = commands.run("sweep", "retry", "s", finished, "trust=[sweeping]", cwd=tmp_path)
    assert other.returncode == 2 and f"{finished} is no job in s that has failed" in other.stderr
    again = commands.run("sweep", "retry", "s", f"s/{failed}", "trust=[sweeping]", cwd=tmp_path)
    assert again.returncode == 0 and "1 jobs in s" in again.stdout, again.stderr
    assert (tmp_path / "s" / failed / "result.json").exists()
    assert (tmp_path / "s" / finished / "events.jsonl").read_text().count('"started"') == 1
    assert "no job has failed" in commands.run("sweep", "retry", "s", cwd=tmp_path).stdout


@pytest.mark.campaign("signals")
def test_a_request_stops_every_worker_and_a_later_start_goes_on(tmp_path: Path) -> None:
    words = [*SMALL, "steps=1000000", "seed=range(0,4)", "sweep.out=s", "sweep.parallel=1"]
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path}
    first = Forked([*COMMAND, "-m", *words], **pipes)  # type: ignore[arg-type]
    wait_for_jobs(tmp_path, 1)
    other = Forked([*COMMAND, "sweep", "work", "s", "sweep.parallel=1"], **pipes)  # type: ignore[arg-type]
    wait_for_jobs(tmp_path, 2)
    assert commands.run("sweep", "stop", "s", cwd=tmp_path).returncode == 0
    for worker in (first, other):
        _, error = worker.communicate(timeout=60)
        assert worker.returncode == 75 and "asked to stop by dtrain sweep stop" in error
    results = [json.loads(path.read_text()) for path in (tmp_path / "s").glob("*/result.json")]
    assert [result["status"] for result in results] == ["preempted", "preempted"], "each job has saved and stopped"
    third = Forked([*COMMAND, "-m", *words], **pipes)  # type: ignore[arg-type]
    time.sleep(12)  # twice the time in which it looks for a request
    assert third.poll() is None
    third.terminate()
    third.communicate(timeout=60)
    assert third.returncode == 75


def wait_for_jobs(place: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list((place / "s").glob("*/metrics.jsonl"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)
