"""Workers of a sweep that engines start on nodes, and that a scheduler queues as an array."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import commands
import pytest
import ray_cluster
import standalone
from commands import COMMAND, Forked
from slurm import slurm
from ssh import hosts
from until import until

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.config.environment import HANDED, SOURCE, WORKERS
from dtrain.resolve import resolve
from dtrain.storage import options
from dtrain.sweep import jobs, worker
from dtrain.sweep.crew import Nodes, OfEngine, crew, split
from dtrain.sweep.foreign import OURS
from dtrain.sweep.jobs import Request

SMALL = ["model=mlp", "data=synthetic", "objective=regression", "hook=[]", "logger=[]", "checkpoint.every=50"]


def results(root: Path) -> dict[str, int]:
    """The folder of each finished job -> its last step."""
    ended = {path.parent.name: json.loads(path.read_text()) for path in root.glob("seed-*/result.json")}
    return {name: result["step"] for name, result in ended.items() if result["status"] == "finished"}


def workers(place: Path) -> list[int]:
    """The processes that engines started as workers in this folder."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if arguments[1:3] == [b"-m", b"dtrain.sweep.worker"] and (entry / "cwd").readlink() == place:
                pids.append(int(entry.name))
    return pids


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "it's here"
    folder.mkdir()
    return folder


@pytest.fixture(params=["ssh", "ray", "spark", pytest.param("openmpi", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The words that start two workers."""
    if request.param == "openmpi":
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            monkeypatch.setenv(name, "1")
        yield ["launcher=mpi", "launcher.command='mpirun.openmpi --host localhost:2'", "sweep.workers=2"]
        return
    if request.param == "ray":
        with ray_cluster.running() as cluster:
            yield ["launcher=ray", f"launcher.cluster={cluster.address}", "sweep.workers=2"]
        return
    if request.param == "spark":
        (tmp_path / "cluster").mkdir()
        with standalone.spark(tmp_path / "cluster") as (master, variables):
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            conf = [f"launcher.conf={standalone.CONF}", "launcher.address=127.0.0.1"]
            yield ["launcher=spark", f"launcher.master={master}", *conf, "sweep.workers=2"]
        return
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={Path(__file__).parents[2]} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    with hosts(tmp_path) as (names, options):
        yield [
            "launcher=ssh", f"launcher.hosts=[{','.join(names)}]", f"launcher.options='{' '.join(options)}'",
            f"launcher.python={python}", "sweep.workers=2",
        ]  # fmt: skip


@pytest.mark.often("ssh")
@pytest.mark.campaign("kills")
def test_workers_on_nodes_share_the_jobs_and_come_back(engine: list[str], place: Path) -> None:
    words = ["-m", *SMALL, "steps=1000", "seed=range(0,6)", "sweep.parallel=1", "sweep.out=s"]
    command = Forked([*COMMAND, *words, *engine], cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: results(place / "s"))
    os.kill(workers(place)[0], signal.SIGKILL)
    said, complained = command.communicate(timeout=200)
    assert command.returncode == 0, complained
    assert [*results(place / "s").values()] == [1000] * 6
    assert said.count(" finished seed=") == 6 and "Traceback" not in complained
    assert not workers(place)


@pytest.mark.often("ssh")
@pytest.mark.campaign("kills")
def test_ctrl_c_has_the_jobs_of_all_workers_save(engine: list[str], place: Path) -> None:
    words = ["-m", *SMALL, "steps=1000000", "seed=range(0,4)", "sweep.parallel=1", "sweep.out=s"]
    command = Forked([*COMMAND, *words, *engine], cwd=place, stderr=subprocess.DEVNULL)
    until(lambda: len({path.parents[2] for path in (place / "s").glob("seed-*/checkpoints/*/*/COMMIT.json")}) > 1)
    command.send_signal(signal.SIGINT)
    assert command.wait(100) == 130
    until(lambda: not workers(place), 20)
    ended = [json.loads(path.read_text())["status"] for path in (place / "s").glob("seed-*/result.json")]
    assert ended == ["preempted"] * 2


@pytest.mark.slow
@pytest.mark.campaign("kills")
def test_twelve_jobs_on_an_array_of_two_survive_three_preemptions(tmp_path: Path, place: Path) -> None:
    (tmp_path / "slurm").mkdir()
    with slurm(tmp_path / "slurm") as variables:
        environment = {**os.environ, **variables, "PATH": f"{os.environ['PATH']}:/usr/sbin"}

        def asked(*command: str) -> str:
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

        words = ["-m", *SMALL, "steps=3000", "seed=range(0,12)", "sweep.parallel=1", "sweep.out=s", "launcher=slurm"]
        words += ["sweep.workers=2", "launcher.save_before=0"]
        command = Forked([*COMMAND, *words], cwd=place, env=environment, text=True, stdout=subprocess.PIPE)
        for number in range(3):
            until(lambda: len(results(place / "s")) > 2 * number)  # noqa: B023 - it is called at once
            before = asked("squeue", "--noheader", "--states=RUNNING", "--partition=main", "--format=%A").split()
            high = ["sbatch", "--parsable", "--partition=hi", "--nodes=2", "--exclusive", "--output=/dev/null"]
            job = asked(*high, "--wrap", "sleep 1").strip()
            until(lambda: job not in asked("squeue", "--noheader", "--format=%A").split())  # noqa: B023
            for task in before:
                subprocess.run(["scontrol", "update", f"JobId={task}", "StartTime=now"], env=environment)
        said = command.communicate(timeout=300)[0]
        assert command.returncode == 0, said
        assert [*results(place / "s").values()] == [3000] * 12
        assert said.count(" finished seed=") == 12


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["launcher=ssh", "launcher.hosts=[a]"],
            "launcher=ssh: with -m it starts workers on nodes. Type sweep.workers=",
        ),
        (["launcher=ssh", "launcher.hosts=[a]", "sweep.workers=2"], "nodes=2, but launcher.hosts has 1"),
        (["launcher=slurm", "sweep.workers=2", "nodes=2"], "a job of a sweep runs on the node of its worker"),
        pytest.param(
            ["launcher=slurm", "sweep.workers=2", "hydra/launcher=joblib"],
            "hydra/launcher=joblib starts the workers",
            marks=pytest.mark.needs("hydra_plugins.hydra_joblib_launcher"),
        ),
        (
            ["launcher=mpi", "launcher.command=mpirun --host a,b"],
            "it cannot be swept. Quote a text with a comma twice: launcher.command='\"a,b\"'",
        ),
        (["launcher=slurm,local"], "Type launcher=slurm beside -m, neither swept nor in a recipe"),
    ],
)
def test_what_starts_no_workers_is_refused(words: list[str], sentence: str, tmp_path: Path) -> None:
    done = commands.run("-m", *SMALL, "steps=2", "seed=0,1", *words, "sweep.out=s", cwd=tmp_path)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert not (tmp_path / "s").exists()


def test_a_finished_sweep_starts_no_worker(tmp_path: Path) -> None:
    words = ["-m", *SMALL, "steps=2", "seed=0,1", "sweep.out=s"]
    assert commands.run(*words, cwd=tmp_path).returncode == 0
    done = commands.run(*words, "launcher=slurm", "sweep.workers=2", cwd=tmp_path)
    assert done.returncode == 0 and "of which 2 are finished" in done.stdout, done.stderr
    assert not (tmp_path / "s" / "logs").exists()


def test_an_engine_of_the_users_own_starts_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "outside")
    words = ["seed=0,1", "launcher._target_=kit.engine.Processes", "trust=[kit]", "sweep.out=s"]
    request, nodes = split(jobs.read(words))
    assert nodes and nodes.word == "launcher._target_=kit.engine.Processes"
    assert [word.key for word in request.words] == ["trust"]


@pytest.mark.parametrize(("data", "devices"), [("data=synthetic", 4), ("data=ray", 3)])
def test_workers_leave_a_cpu_to_tasks_that_read_the_rows(data: str, devices: int) -> None:
    words = ["model=mlp", "objective=regression", "threads=1", data]
    words += ["data.path=rows", "data.inputs=x", "data.targets=y"] if data == "data=ray" else []
    config, host = compose([*words, "sweep.workers=2"]), Cluster(gpus=0, cpus=4)
    judged = SimpleNamespace(plan=resolve(compose(words), host), config=config, slots=8)
    nodes = Nodes("launcher=ray", compose(["launcher=ray"]).launcher, host)
    workers = crew(cast(Any, judged), Request("s", (), (), ()), OURS, nodes)
    assert isinstance(workers, OfEngine) and workers._plan.devices == devices
    workers._engine.stop()


def test_a_worker_with_another_dtrain_is_refused(tmp_path: Path) -> None:
    environment = {**os.environ, WORKERS: "ssh-1", HANDED: options.hand_over(), SOURCE: "another"}
    command = [sys.executable, "-m", "dtrain.sweep.worker", str(tmp_path)]
    assert subprocess.run(command, env=environment, cwd=tmp_path, timeout=60).returncode == 3
    ((code, complaints),) = worker.ends(str(tmp_path), "ssh-1")
    assert code == 3 and complaints.endswith(
        "the source of dtrain here differs from that of the command. Install the same one."
    )
