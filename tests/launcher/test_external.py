"""Ranks that torchrun, srun and mpirun started, and nodes whose processes somebody else started."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import commands
import pytest
from launching import WORDS, free_port, started, steps_of, wait_for_step
from slurm import slurm

from dtrain.launcher.external import launcher_of
from dtrain.storage import lease

SLOW = ["model._target_=launching.Slow", "model.rank=0", "batch=8", "steps=20000", "checkpoint.every=2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
DIRECTLY = ["-m", "dtrain"]
IN_A_SHELL = ["--no-python", "bash", "-c", f'{sys.executable} -m dtrain "$@"; exit $?', "ranks"]


def torchrun(*words: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dtrain", *WORDS, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)


@pytest.mark.campaign("network")
def test_the_ranks_that_are_there_are_used(tmp_path: Path) -> None:
    done = torchrun("model=mlp", f"out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "external (auto: RANK and WORLD_SIZE are set)" in " ".join((tmp_path / "plan.yaml").read_text().split())
    assert steps_of(tmp_path) == list(range(1, 13))


def test_wrong_words_are_told_once(tmp_path: Path) -> None:
    """By one of the ranks, which begin as torchrun begins them."""
    words = [*WORDS, "model=mlp", f"out={tmp_path}", "launcher=external", "devices=3"]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    of_ranks = [{"RANK": rank, "LOCAL_RANK": rank, **place} for rank in "01"]
    done = [commands.run(*words, env={**environment(), **variables}) for variables in of_ranks]
    assert all(rank.returncode for rank in done)
    assert "".join(rank.stderr for rank in done).count("started as one of 2 ranks") == 1


def test_without_ranks_it_is_refused() -> None:
    done = commands.run("launcher=external")
    assert done.returncode == 2
    assert "torchrun" in done.stderr


@contextmanager
def training(out: Path, *words: str, by: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Ranks in the midst of a run, whose launcher is the process; none is left behind by the test."""
    launcher = started(out, *SLOW, *words, by=[*TORCHRUN, *by])
    try:
        wait_for_step(out, 5)
        yield launcher
    finally:
        launcher.kill()
        for pid in ranks_of(out):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        assert launcher.stdout
        launcher.stdout.close()


def ranks_of(out: Path) -> list[int]:
    """Processes of dtrain that write under `out`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode().split("\0")
        except OSError:
            continue
        if f"out={out}" in words and "dtrain" in words and "torch.distributed.run" not in words and "-c" not in words:
            found.append(int(entry.parent.name))
    return found


@pytest.mark.often("in_a_shell")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("ranks", [DIRECTLY, IN_A_SHELL], ids=["directly", "in_a_shell"])
def test_ranks_do_not_outlive_a_killed_launcher_and_the_lease_is_free(ranks: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with training(out, by=["--standalone", "--nproc-per-node=2", *ranks]) as torchrun:
        assert len(ranks_of(out)) == 2
        torchrun.kill()
        assert all_gone(out, 120)
        output = torchrun.communicate()[0]
    assert output.count("dtrain: the launcher of the ranks (pid ") == 1, output
    assert "Traceback" not in output
    assert json.loads((out / "failure.json").read_text())["error"].startswith("the launcher of the ranks")
    assert lease.holder(str(out))[0] in ("free", "left")
    again = commands.run(*WORDS, *SLOW, f"out={out}", "stop_after=1", env=environment())
    assert again.returncode == 0, again.stderr
    assert "watching for" not in again.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def all_gone(out: Path, seconds: float) -> bool:
    """Whether no rank lives by then; what waits to be collected by a launcher that was stopped has ended."""
    deadline = time.monotonic() + seconds
    while ranks_of(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not ranks_of(out)


@pytest.mark.campaign("signals")
def test_a_stopped_launcher_that_holds_the_store_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with training(
        out, "backend=gloo", "backend.timeout=10", by=["--standalone", "--nproc-per-node=2", *DIRECTLY]
    ) as torchrun:
        torchrun.send_signal(signal.SIGSTOP)
        assert all_gone(out, 120)
        assert "the store process at " in json.loads((out / "failure.json").read_text())["error"]
    assert lease.holder(str(out))[0] in ("free", "left")


def test_a_rank_that_a_shell_left_in_the_background_goes_on() -> None:
    assert launcher_of(os.getppid(), {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert launcher_of(os.getpid(), {"SLURM_STEP_ID": "0"}) == os.getpid()


@pytest.mark.slow
def test_when_the_first_of_two_launchers_is_killed_the_ranks_of_both_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    nodes = [
        [
            "--nnodes=2",
            f"--node-rank={node}",
            "--master-addr=127.0.0.1",
            "--master-port=29731",
            "--nproc-per-node=1",
            *DIRECTLY,
        ]
        for node in (0, 1)
    ]
    second = started(out, *SLOW, by=[*TORCHRUN, *nodes[1]])
    with training(out, by=nodes[0]) as first:
        first.kill()
        output, _ = second.communicate(timeout=300)
        assert all_gone(out, 120)
    assert second.returncode not in (0, -signal.SIGKILL), output
    assert lease.holder(str(out))[0] in ("free", "left")


SMALL = ["model=mlp", *WORDS, "strategy=ddp", "batch=16", "hook=[]"]
POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "2"}
"""A pod of a PyTorchJob, but for its number and port."""
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
ENGINES = {
    "srun": ["srun", "-N2", "--ntasks-per-node=2"],
    "mpirun": ["mpirun.openmpi", "-np", "4", "--oversubscribe"],
    "mpiexec": ["mpiexec.hydra", "-n", "4"],
}


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two nodes with two ranks each, which dtrain starts on this host."""
    out = tmp_path_factory.mktemp("local") / "out"
    done = commands.run(*SMALL, "nodes=2", "devices=2", f"out={out}", env=environment())
    assert done.returncode == 0, done.stderr
    return losses(out)


@contextmanager
def pods(out: Path, *words: str) -> Iterator[Callable[[int], commands.Forked]]:
    """Starts the pod of this number, of two of one job; none is left behind."""
    shared = {**environment(), **POD, "MASTER_PORT": str(free_port())}
    started = list[commands.Forked]()

    def start(rank: int) -> commands.Forked:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [*commands.COMMAND, *SMALL, f"out={out}", *words]
        started.append(commands.Forked(command, env={**shared, "RANK": str(rank)}, **pipes))
        return started[-1]

    try:
        yield start
    finally:
        for pod in started:
            pod.kill()
            pod.communicate()


def ended(*running: commands.Forked) -> tuple[list[int], list[str]]:
    """The exit codes and outputs of pods."""
    outputs = [pod.communicate(timeout=300)[0] for pod in running]
    return [pod.returncode for pod in running], outputs


@pytest.mark.campaign("network")
def test_the_pods_of_a_job_are_the_nodes_of_one_run(tmp_path: Path, local: list[float]) -> None:
    with pods(tmp_path / "out") as start:
        codes, outputs = ended(start(0), start(1))
    assert codes == [0, 0], outputs
    assert losses(tmp_path / "out") == local
    assert "2 nodes x 2 on cpu" in outputs[0] and outputs[1] == ""


@pytest.mark.campaign("kills")
def test_a_killed_rank_of_a_pod_starts_again_and_a_failed_run_fails_in_every_pod(tmp_path: Path) -> None:
    with pods(tmp_path / "out", "model._target_=launching.Killed", "model.rank=3", "checkpoint.every=2") as start:
        codes, outputs = ended(start(0), start(1))
    assert codes == [0, 0], outputs
    assert steps_of(tmp_path / "out") == list(range(1, 13))
    with pods(tmp_path / "bad", "model._target_=launching.Raises", "model.rank=3", "model.at=2") as start:
        codes, outputs = ended(start(0), start(1))
    assert codes == [1, 1]
    assert "planned" in outputs[0] and "the first node says why" in outputs[1]


@pytest.mark.campaign("kills")
def test_the_pod_of_the_first_node_may_be_killed_and_started_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pods(out, "model._target_=launching.Slow", "model.rank=0", "steps=40", "checkpoint.every=2") as start:
        first, second = start(0), start(1)
        wait_for_step(out, 5)
        first.kill()
        first.wait()
        codes, outputs = ended(start(0), second)
    assert codes == [0, 0], outputs
    assert steps_of(out) == list(range(1, 41))
    assert "looking for the server again" in outputs[1]


@pytest.mark.campaign("signals")
def test_a_pod_that_is_told_to_go_saves_and_ends_the_run_as_preempted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pods(out, "model._target_=launching.Slow", "model.rank=0", "steps=20000") as start:
        first, second = start(0), start(1)
        wait_for_step(out, 5)
        second.send_signal(signal.SIGTERM)
        codes, outputs = ended(first, second)
    assert codes == [75, 75], outputs
    assert [*(out / "checkpoints").glob("step-*/*/COMMIT.json"), *(out / "checkpoints").glob("step-*/COMMIT.json")]


@pytest.mark.campaign("network")
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_of_an_engine_have_the_losses_of_local_ones(engine: str, tmp_path: Path, local: list[float]) -> None:
    command = ENGINES[engine]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not here. Type: apt-get install slurm-wlm munge openmpi-bin mpich, as root")
    ours = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **environment()}
    root, out = tmp_path / "engine", tmp_path / "out"
    root.mkdir()
    with slurm(root) if engine == "srun" else nullcontext({}) as queue:
        words = [sys.executable, "-m", "dtrain", *SMALL, f"out={out}"]
        done = subprocess.run([*command, *words], env={**ours, **queue}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(out) == local
    assert not (out / "meeting.json").exists()


@pytest.mark.campaign("network")
def test_ranks_without_an_address_meet_by_a_file_and_not_by_that_of_an_earlier_start(
    tmp_path: Path, local: list[float]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    facts = {"address": "127.0.0.1", "port": 9, "door": 9, "job": "torch  4", "start": "0" * 32, "signature": ""}
    (out / "meeting.json").write_text(json.dumps(facts))
    with ExitStack() as stack:
        ranks = list["subprocess.Popen[str]"]()
        for rank in ("3", "2", "1", "0"):
            place = {"RANK": rank, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
            command = [*commands.COMMAND, *SMALL, f"out={out}"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            ranks.append(commands.Forked(command, env={**environment(), **place}, **pipes))
            stack.callback(ranks[-1].kill)
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, outputs
    assert losses(out) == local


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "1"}, "rank 1 has waited 0.5 s for rank 0, which writes its address to "),
        ({"RANK": "0"}, "rank 0 has waited 0.5 s for 2 of 3 ranks (1, 2): they did not come."),
        ({"RANK": "0", **ADDRESS}, "in this shell, type unset RANK WORLD_SIZE."),
        ({"RANK": "1", **ADDRESS, "MASTER_PORT": "9"}, "there is no store at 127.0.0.1:9"),
    ],
)
def test_ranks_that_do_not_come_are_told(variables: dict[str, str], sentence: str, tmp_path: Path) -> None:
    words = [*SMALL, "batch=12", "launcher=external", "launcher.wait=0.5", f"out={tmp_path}"]
    done = commands.run(*words, env={**environment(), "WORLD_SIZE": "3", **variables})
    assert done.returncode == 3 and sentence in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"RANK": "3", "WORLD_SIZE": "two"}, ["WORLD_SIZE=two"]),
        ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, ["RANK=1", "PMI_RANK=0"]),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, ["SM_HOSTS", "SM_CURRENT_HOST=b"]),
    ],
)  # fmt: skip
def test_variables_that_contradict_are_the_words_fault(variables: dict[str, str], names: list[str]) -> None:
    done = commands.run(*SMALL, env={**environment(), **variables})
    assert done.returncode == 2
    assert done.stderr.startswith("dtrain: ") and done.stderr.count("\n") == 1
    assert all(name in done.stderr for name in names)


def test_nodes_on_a_network_need_a_secret(tmp_path: Path) -> None:
    variables = {
        **environment(),
        **POD,
        "MASTER_ADDR": "192.0.2.7",
        "MASTER_PORT": "9",
        "RANK": "1",
        "DTRAIN_SECRET": "",
    }
    done = commands.run(*SMALL, f"out={tmp_path}", env=variables)
    assert done.returncode == 3
    assert "DTRAIN_SECRET is not set" in done.stderr
