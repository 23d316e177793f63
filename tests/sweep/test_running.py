"""A job that gives no sign of life counts as lost; and what an engine that was killed leaves on the local disk."""

import os
import signal
import subprocess
from pathlib import Path

import commands
import pytest
from commands import COMMAND
from killing import mentioning
from sweep.test_engine import SMALL, TROUBLE, jobs, starts
from until import until


@pytest.mark.campaign("kills")
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("suspended", "it was suspended (SIGSTOP) for 5 s (backend.timeout) and counts as lost; it starts again"),
        ("hangs", "it starts again"),
    ],
)
def test_a_job_without_a_sign_of_life_is_ended_and_tried_again(how: str, sentence: str, tmp_path: Path) -> None:
    words = [
        *TROUBLE,
        f"model.how={how}",
        f"model.once={tmp_path}/once",
        "seed=0,1",
        "backend=gloo",
        "backend.timeout=5",
    ]
    done = commands.run("-m", *words, "sweep.out=s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "it starts again" in line]
    assert sentence in line, done.stderr
    assert sorted(map(starts, jobs(tmp_path / "s").values())) == [1, 2]


def test_a_job_that_hangs_has_the_cause_that_its_watchdog_saw(tmp_path: Path) -> None:
    done = commands.run(
        "-m",
        *TROUBLE,
        "model.how=none,hangs",
        "backend=gloo",
        "backend.timeout=2",
        "sweep.retries=0",
        "sweep.out=s",
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert "failed: 1 x " in done.stderr and "no progress for" in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.campaign("kills")
def test_the_next_start_removes_what_a_killed_engine_left(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}  # which a process that is forked from this one does not read
    sweep = subprocess.Popen(
        [*COMMAND, "-m", *SMALL, "steps=4000", "seed=0,1", "sweep.out=s"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    until(lambda: len([*(tmp_path / "s").glob("*/metrics.jsonl")]) == 2)
    os.kill(sweep.pid, signal.SIGKILL)
    sweep.wait(60)
    until(lambda: not mentioning(str(tmp_path)))
    assert [*temporary.glob("dtrain-sweep-*")], "nothing was left, so nothing is shown"
    subprocess.run(
        [*COMMAND, "-m", *SMALL, "seed=0,1", "sweep.out=t"],
        cwd=tmp_path,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert not [*temporary.glob("dtrain-*")]
