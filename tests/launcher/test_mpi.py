"""Nodes that the launchers of Open MPI and MPICH start: the losses of local nodes, and nothing left of them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from commands import COMMAND, Forked
from launching import agents_in

LAUNCHERS = {
    "openmpi": ("mpirun.openmpi", "mpirun.openmpi --host localhost:2", "openmpi-bin"),
    "mpich": ("mpiexec.hydra", "mpiexec.hydra -hosts localhost", "mpich"),
}
SMALL = (
    "model=mlp", "data=synthetic", "objective=regression", "strategy=ddp", "nodes=2", "devices=2", "hook=[]",
    "logger=[]", "checkpoint.every=50",
)  # fmt: skip


@pytest.fixture(params=LAUNCHERS)
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    program, command, package = LAUNCHERS[request.param]
    if not shutil.which(program):
        pytest.skip(f"{program} is not here. Type: apt-get install {package}")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    yield ["launcher=mpi", f"launcher.command='{command}'", "launcher.address=127.0.0.1"]


def wait_for(path: Path, command: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or not path.stat().st_size:
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)


@pytest.mark.campaign("network")
def test_two_nodes_have_the_losses_of_local_ones(words: list[str], tmp_path: Path) -> None:
    for launcher, out in ((words, "far"), (["launcher=local"], "near")):
        done = commands.run(*SMALL, "steps=6", *launcher, f"out={out}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    far, near = (
        [json.loads(line)["loss"] for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("far", "near")
    )
    assert far == near and len(far) == 6
    assert not agents_in(tmp_path)


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("way", ["killed", "once", "twice"])
def test_nothing_runs_on_when_the_command_ends(words: list[str], way: str, tmp_path: Path) -> None:
    command = Forked(
        [*COMMAND, *SMALL, "steps=1000000", *words, "launcher.wait=10", "out=a"],
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    wait_for(tmp_path / "a" / "metrics.jsonl", command)
    os.kill(command.pid, signal.SIGKILL if way == "killed" else signal.SIGINT)
    if way == "twice":
        os.kill(command.pid, signal.SIGINT)
    assert command.wait(120) == {"killed": -signal.SIGKILL, "twice": 130, "once": 130}[way]
    deadline = time.monotonic() + 60
    while agents_in(tmp_path):
        assert time.monotonic() < deadline, agents_in(tmp_path)
        time.sleep(0.1)
    assert way != "once" or any((tmp_path / "a" / "checkpoints").rglob("COMMIT.json"))


@pytest.mark.campaign("kills")
def test_a_killed_agent_is_started_again(words: list[str], tmp_path: Path) -> None:
    run = [*SMALL, "steps=4000", *words, "out=a"]
    command = Forked([*COMMAND, *run], cwd=tmp_path, stderr=subprocess.DEVNULL)
    wait_for(tmp_path / "a" / "metrics.jsonl", command)
    agent = next(line for line in agents_in(tmp_path) if line.split()[1].startswith(sys.executable))
    os.kill(int(agent.split()[0]), signal.SIGKILL)
    assert command.wait(200) == 0
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert len([event for event in events if event["event"] == "started"]) > 1


@pytest.mark.parametrize(
    ("command", "code", "sentence"),
    [
        ("/no/mpirun", 3, "there is no /no/mpirun here. Install openmpi-bin or mpich"),
        ("true", 3, "launcher.command=true is no launcher of Open MPI, MPICH, Intel MPI or Slurm"),
        ('mpirun "', 2, "No closing quotation. Quote it as in a shell"),
        ("", 2, "launcher.command is empty"),
    ],
)
def test_what_is_no_launcher_is_refused(command: str, code: int, sentence: str, tmp_path: Path) -> None:
    done = commands.run(*SMALL, "steps=6", "launcher=mpi", f"launcher.command='{command}'", "out=a", cwd=tmp_path)
    assert done.returncode == code and sentence in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
