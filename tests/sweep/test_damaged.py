"""What kills, hands and storage that is not atomic leave in the folder of a sweep: the same command goes on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import commands
import pytest
from sweep.test_engine import SMALL, TROUBLE, finished, jobs, result
from sweep.test_searches import KNOWN, SPACE, drawn, statuses


def empty(name: str) -> Callable[[Path], None]:
    return lambda job: job.joinpath(name).write_bytes(b"")


def torn(name: str) -> Callable[[Path], None]:
    """The last row ends in its middle."""
    return lambda job: job.joinpath(name).write_bytes(job.joinpath(name).read_bytes()[:-20])


DAMAGES: list[Callable[[Path], None]] = [
    empty("plan.yaml"), empty("config.yaml"), empty("events.jsonl"), empty("metrics.jsonl"), torn("events.jsonl"),
    torn("metrics.jsonl"), lambda job: next(job.glob("checkpoints/*/*/*.json")).write_bytes(b""), shutil.rmtree,
]  # fmt: skip


def test_whatever_a_kill_leaves_of_a_job_it_finishes_with_the_same_result(tmp_path: Path) -> None:
    words = ["-m", *SMALL, "checkpoint.every=2", f"seed=range(0,{len(DAMAGES)})", "sweep.out=s"]
    assert commands.run(*words, cwd=tmp_path).returncode == 0
    there = jobs(tmp_path / "s")
    before = {name: result(job) for name, job in there.items()}
    for number, damage in enumerate(DAMAGES):
        job = there[f"seed-{number}"]
        (job / "result.json").write_bytes(b"" if number % 2 else b'{"status": "finis')
        damage(job)
    (tmp_path / "s" / "sweep.yaml").write_bytes(b"")
    again = commands.run(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(finished(tmp_path / "s")) == len(DAMAGES)
    for name, (loss, tensors) in before.items():
        now, last = result(there[name])
        assert now in (loss, None) and last[-1] == tensors[-1], name  # None: the row that had it was lost
    assert commands.run("sweep", "work", "s", cwd=tmp_path).returncode == 0, "sweep.yaml is there again"


@pytest.mark.needs("optuna")
def test_a_trial_whose_file_is_empty_or_gone_is_drawn_again_as_it_was(tmp_path: Path) -> None:
    words = ["-m", *KNOWN, *SPACE, "sweep.search=tpe", "sweep.trials=6", "sweep.parallel=1", "sweep.out=s"]
    assert commands.run(*words, cwd=tmp_path).returncode == 0
    before = drawn(tmp_path / "s")
    (tmp_path / "s/trials/00005.json").write_bytes(b"")
    (tmp_path / "s/trials/00003.json").unlink()
    again = commands.run(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert drawn(tmp_path / "s") == before and statuses(tmp_path / "s") == ["finished"] * 6


def test_a_trial_that_was_written_by_hand_is_refused_before_anything(tmp_path: Path) -> None:
    words = ["-m", *KNOWN, *SPACE, "sweep.search=random", "sweep.trials=3", "sweep.out=s"]
    assert commands.run(*words, cwd=tmp_path).returncode == 0
    file = tmp_path / "s/trials/00002.json"
    for values in ({}, {"model.x": 7.0}, {"model.x": 0.5, "model.y": 0.5, "model.kind": "a"}):
        file.write_text(
            json.dumps({"job": json.loads((tmp_path / "s/trials/00000.json").read_text())["job"], "values": values})
        )
        wrong = commands.run(*words, cwd=tmp_path)
        assert wrong.returncode == 3 and "it is no trial of this search" in wrong.stderr, wrong.stderr
        assert "Remove it" in wrong.stderr and len(wrong.stderr.splitlines()) == 1


@pytest.mark.campaign("kills")
def test_a_job_may_print_a_gigabyte_and_lose_its_folder_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP", f"{tmp_path}/s/model.how-removes-*")
    words = ["-m", *TROUBLE, "model.how=gigabyte,removes,none", "sweep.out=s"]
    done = commands.run(*words, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    log = (jobs(tmp_path / "s")["model.how-gigabyte"] / "log.txt").read_bytes()
    assert len(log) < 4 << 20 and b"bytes are left out" in log and log.rstrip().endswith(b"the end")
    assert len(finished(tmp_path / "s")) == 3
