"""Runs as jobs of a real Slurm of two nodes: the losses of local ranks, and no step lost to preemption or time limits."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
import torch
from commands import COMMAND, Forked
from slurm import slurm
from until import until

import dtrain
from dtrain.errors import PreflightError
from dtrain.testing.engine import EngineTests, agents

SMALL = (
    "model=mlp", "data=synthetic", "objective=regression", "strategy=ddp", "nodes=2", "devices=2", "hook=[]",
    "logger=[]", "checkpoint.every=50", "launcher=slurm", "launcher.save_before=0",
)  # fmt: skip
LONG = (*SMALL, "steps=1000000", "checkpoint.every=100000")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm(tmp_path_factory.mktemp("slurm")) as variables:
        yield {**os.environ, **variables, "PATH": f"{os.environ['PATH']}:/usr/sbin"}


@pytest.fixture
def queue(cluster: dict[str, str]) -> Iterator[dict[str, str]]:
    """The variables of a command that sees an empty queue."""
    yield cluster
    asked(cluster, "scancel", "--user=root")
    until(lambda: not asked(cluster, "squeue", "--noheader"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "it's here"
    folder.mkdir()
    return folder


def asked(queue: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=queue, capture_output=True, text=True, timeout=60, check=True).stdout


def rows(out: Path) -> list[dict[str, float]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()[:-1]] if path.exists() else []


def job_of(out: Path) -> str:
    return str(json.loads((out / "engine.json").read_text())["job"])


def started(out: Path) -> list[int]:
    """The steps at which the run has started; a line may be half written."""
    lines = (out / "events.jsonl").read_text().splitlines(keepends=True)
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event["step"] for event in events if event["event"] == "started"]


def memory(pid: int, *kinds: str) -> int:
    """Bytes."""
    fields = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(amount) << 10 for kind, amount, *_ in fields if kind.removesuffix(":") in kinds)


@pytest.mark.campaign("kills")
class TestSlurm(EngineTests):
    start, detached, words = Forked, True, ("launcher=slurm",)
    slow = (
        "test_a_killed_agent_starts_again", "test_a_second_ctrl_c_ends_all", "test_the_first_error_of_a_rank_is_shown",
        "test_nodes_with_another_version_of_a_package_are_refused_by_name",
    )  # fmt: skip

    @pytest.fixture(autouse=True)
    def _queue(self, queue: dict[str, str]) -> None:
        self.environment = queue


@pytest.mark.campaign("network")
def test_two_commands_at_once_submit_one_job(queue: dict[str, str], place: Path) -> None:
    words = [*COMMAND, *LONG, "launcher.detach=true", "out=run"]
    both = [
        Forked(words, cwd=place, env=queue, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    said = [each.communicate(timeout=120)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], said
    job = job_of(place / "run")
    assert asked(queue, "squeue", "--noheader", "--format=%i").split() == [job]
    assert all(f"job {job}" in each for each in said), said


@pytest.mark.campaign("network")
def test_a_command_that_follows_its_job_and_the_agents_are_small(queue: dict[str, str], place: Path) -> None:
    command = subprocess.Popen([*COMMAND, *LONG, "out=a"], cwd=place, env=queue, stdout=subprocess.DEVNULL)
    until(lambda: rows(place / "a"))
    assert memory(command.pid, "Rss") < 60 << 20 and "libtorch" not in Path(f"/proc/{command.pid}/maps").read_text()
    assert len(agents(place)) == 2
    assert all(memory(agent, "Private_Clean", "Private_Dirty") < 20 << 20 for agent in agents(place))
    command.send_signal(signal.SIGINT)
    assert command.wait(100) == 130


@pytest.mark.campaign("network")
def test_a_job_that_waits_is_let_go_followed_and_cancelled(queue: dict[str, str], place: Path) -> None:
    held = [*LONG, "launcher.more=[--hold,'--comment=two words # more','-w n[1-2]']", "out=a"]
    done = commands.run(*held, "launcher.detach=true", cwd=place, env=queue)
    assert done.returncode == 0 and "the same words with launcher.detach=false follow it" in done.stdout, done.stderr
    assert asked(queue, "squeue", "--noheader", "--format=%k").strip() == "two words # more"
    job = job_of(place / "a")
    assert f"queued, job {job}" in commands.run("runs", ".", cwd=place, env=queue).stdout
    command = Forked([*COMMAND, *held], cwd=place, env=queue, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert any(" runs it" in line for line in command.stdout)
    sentence = f"note: job {job} is queued (JobHeldUser); Slurm cannot say when it begins\n"
    assert any(line == sentence for line in command.stderr)
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=100)
    assert command.returncode == 130
    commands.run(*held, "launcher.detach=true", cwd=place, env=queue)
    done = commands.run("stop", "a", cwd=place, env=queue)
    assert done.returncode == 0 and "was taken out of the queue before it began" in done.stdout, done.stderr
    assert not asked(queue, "squeue", "--noheader")


@pytest.mark.campaign("network")
def test_a_line_of_setup_that_fails_ends_the_job_and_a_variable_hides_no_line(
    queue: dict[str, str], place: Path
) -> None:
    words = [*SMALL, "nodes=1", "steps=2", "launcher.setup=['export A=1','source nowhere/activate']", "out=a"]
    done = commands.run(*words, cwd=place, env={**queue, "SBATCH_OUTPUT": "/dev/null"})
    assert done.returncode == 3, done.stdout + done.stderr
    assert "dtrain: launcher.setup: 'source nowhere/activate' failed, exit code 1. Its log: " in done.stderr
    python = place / "python"
    python.write_text(f'#!/bin/sh\necho mine\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    words = [*SMALL, "nodes=1", "steps=2", "launcher.setup=['export PATH=.:$PATH']", "launcher.python=python"]
    done = commands.run(*words, "out=b", cwd=place, env={**queue, "SBATCH_OUTPUT": "/dev/null"})
    assert done.returncode == 0 and done.stdout.count("mine\n") == 2, done.stdout + done.stderr


@pytest.mark.campaign("network")
def test_workers_that_cannot_start_are_told_with_their_log(queue: dict[str, str], place: Path) -> None:
    words = [*SMALL, "nodes=1", "steps=2", "seed=0,1", "launcher.setup=['exit 9']", "sweep.workers=2", "sweep.out=s"]
    done = commands.run("-m", *words, cwd=place, env=queue, timeout=200)
    assert done.returncode == 1 and f"what the workers said: {place}/s/logs" in done.stdout, done.stdout


@pytest.mark.campaign("network")
def test_in_an_allocation_its_nodes_are_used(queue: dict[str, str], place: Path) -> None:
    command = ["salloc", "--nodes=2", "--cpus-per-task=2", *COMMAND, *SMALL, "steps=6", "out=a"]
    done = subprocess.run(command, cwd=place, env=queue, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len((place / "a" / "metrics.jsonl").read_text().splitlines()) == 6
    assert not (place / "a" / "submitted.json").exists()
    fewer = [word.replace("--nodes=2", "--nodes=1").replace("out=a", "out=b") for word in command]
    done = subprocess.run(fewer, cwd=place, env=queue, capture_output=True, text=True, timeout=200)
    assert done.returncode == 3 and "nodes=2, but this allocation of Slurm has 1. Type nodes=1" in done.stderr


@pytest.mark.campaign("network")
def test_what_the_scheduler_refuses_is_told_in_its_words(queue: dict[str, str], place: Path) -> None:
    done = commands.run(*SMALL, "steps=6", "launcher.partition=nowhere", "out=a", cwd=place, env=queue)
    assert done.returncode == 3, done.stderr
    assert "invalid partition specified: nowhere" in done.stderr and "Traceback" not in done.stderr


def test_objects_of_this_process_are_in_no_job(tmp_path: Path) -> None:
    words = [word for word in SMALL if not word.startswith(("model", "hook"))]
    with pytest.raises(PreflightError, match=r"objects that were passed to dtrain\.run exist in this process alone"):
        dtrain.run(*words, "steps=2", f"out={tmp_path}/a", model=torch.nn.Linear(64, 10))


def test_other_commands_than_a_run_need_an_allocation(tmp_path: Path) -> None:
    done = commands.run("verify", *SMALL, "steps=6", "out=a", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "launcher=slurm: this command submits no job. Type salloc --nodes=2 first" in done.stdout


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("launcher.time=-5", "launcher.time: '-5' is no time limit"),
        ("launcher.partition='a b'", "launcher.partition='a b': sbatch takes one word without quotes"),
        ("launcher.partition='$(touch x)'", "sbatch takes one word without quotes"),
        ("launcher.more=['--nodes=1']", "'--nodes=1' is stated by the plan, and the plan has 2. Type nodes=1."),
        ("launcher.setup=['export HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345']", "holds a secret"),
        ("out='a\nb'", "is no place for a run"),
    ],
)
def test_what_could_not_stand_in_a_script_is_refused_before_anything_is_written(
    word: str, sentence: str, tmp_path: Path
) -> None:
    done = commands.run(*SMALL, "steps=6", "out=a", word, cwd=tmp_path)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.campaign("network")
def test_other_words_do_not_follow_the_job_of_a_run(queue: dict[str, str], place: Path) -> None:
    detach = [*LONG, "launcher.detach=true", "out=a"]
    done = commands.run(*detach, cwd=place, env=queue)
    assert done.returncode == 0 and "dtrain stop a ends it" in done.stdout, done.stderr
    other = commands.run(*detach, "optim.lr=1", cwd=place, env=queue)
    assert other.returncode == 3 and f"belongs to job {job_of(place / 'a')}" in other.stderr
    done = commands.run(*SMALL, "steps=6", "out=far", cwd=place, env=queue)  # waits for the nodes, or runs beside
    assert done.returncode == 0, done.stderr
    again = commands.run(*SMALL, "steps=6", "out=far", cwd=place, env=queue)
    assert again.returncode == 0 and "already finished" in again.stdout


@pytest.mark.campaign("signals")
def test_a_job_that_is_preempted_comes_back_and_loses_no_step(queue: dict[str, str], place: Path) -> None:
    with (place / "said").open("w") as said:
        command = Forked([*COMMAND, *LONG, "out=a"], cwd=place, env=queue, stdout=said, stderr=said)
    for number in range(1, 4):
        before = len(rows(place / "a"))
        until(lambda before=before: len(rows(place / "a")) > before + 10)  # type: ignore[misc]
        asked(queue, "sbatch", "--partition=hi", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        job = job_of(place / "a")
        until(lambda job=job: "PENDING" in asked(queue, "squeue", "--noheader", "--format=%T", f"--job={job}"))  # type: ignore[misc]
        asked(queue, "scontrol", "update", f"JobId={job}", "StartTime=now")
        until(lambda number=number: len(started(place / "a")) > number)  # type: ignore[misc]
    until(lambda: len(rows(place / "a")) > started(place / "a")[-1] + 10)
    os.kill(command.pid, signal.SIGINT)
    assert command.wait(120) == 130
    steps = [row["step"] for row in rows(place / "a")]
    assert steps == list(range(1, len(steps) + 1))
    text = (place / "said").read_text()
    assert text.count("\nnote: the job is preempted; Slurm queues it again") == 3 and " is queued again (" in text, text
    assert "interrupted" in commands.run("runs", ".", cwd=place, env=queue).stdout
    assert len(started(place / "a")) == 4 and sorted(set(started(place / "a"))) == started(place / "a")


@pytest.mark.campaign("signals")
def test_scancel_ends_a_job_for_good_and_its_state_is_saved(queue: dict[str, str], place: Path) -> None:
    command = Forked([*COMMAND, *LONG, "out=a"], cwd=place, env=queue, stderr=subprocess.DEVNULL)
    until(lambda: len(rows(place / "a")) > 10)
    asked(queue, "scancel", job_of(place / "a"))
    assert command.wait(120) == 75
    assert not asked(queue, "squeue", "--noheader").split()
    assert list((place / "a" / "checkpoints").rglob("COMMIT.json"))


@pytest.mark.campaign("signals")
def test_a_run_that_ends_by_its_own_time_limit_gives_its_nodes_back(queue: dict[str, str], place: Path) -> None:
    done = commands.run(*LONG, "time_limit=60", "grace=10", "out=a", cwd=place, env=queue, timeout=200)
    assert done.returncode == 75, done.stderr
    assert not asked(queue, "squeue", "--noheader").split()
    assert list((place / "a" / "checkpoints").rglob("COMMIT.json"))


@pytest.mark.slow
@pytest.mark.campaign("signals")
def test_a_job_that_its_time_limit_cuts_goes_on_in_another(queue: dict[str, str], place: Path) -> None:
    words = [*LONG, "launcher.time=2", "launcher.save_before=30", "out=a"]
    command = Forked([*COMMAND, *words], cwd=place, env=queue, stderr=subprocess.DEVNULL)
    until(lambda: rows(place / "a"))
    job = job_of(place / "a")
    until(lambda: "PENDING" in asked(queue, "squeue", "--noheader", "--format=%T", f"--job={job}"))
    assert list((place / "a" / "checkpoints").rglob("COMMIT.json"))
    asked(queue, "scontrol", "update", f"JobId={job}", "StartTime=now")
    until(lambda: len(started(place / "a")) > 1)
    os.kill(command.pid, signal.SIGINT)
    assert command.wait(120) == 130
    steps = [row["step"] for row in rows(place / "a")]
    assert steps == list(range(1, len(steps) + 1)) and started(place / "a")[-1] > 0
