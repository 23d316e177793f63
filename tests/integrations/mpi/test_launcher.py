"""Nodes that the launchers of Open MPI and MPICH start: the losses of local nodes, and nothing left of them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from commands import Forked

from dtrain.testing.engine import EngineTests

LAUNCHERS = {
    "openmpi": ("mpirun.openmpi", "mpirun.openmpi --host localhost:2", "openmpi-bin"),
    "mpich": ("mpiexec.hydra", "mpiexec.hydra -hosts localhost", "mpich"),
}
SMALL = (
    "model=mlp", "data=synthetic", "objective=regression", "strategy=ddp", "nodes=2", "devices=2", "hook=[]",
    "logger=[]", "checkpoint.every=50",
)  # fmt: skip


@pytest.fixture
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    program, command, package = LAUNCHERS[request.cls.launcher]
    if not shutil.which(program):
        pytest.skip(f"{program} is not here. Type: apt-get install {package}")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    yield ["launcher=mpi", f"launcher.command='{command}'", "launcher.address=127.0.0.1"]


@pytest.mark.campaign("kills")
class TestMpi(EngineTests):
    launcher, start = "openmpi", Forked
    slow: tuple[str, ...] = (
        "test_a_killed_agent_starts_again", "test_a_second_ctrl_c_ends_all", "test_the_first_error_of_a_rank_is_shown",
    )  # fmt: skip

    @pytest.fixture(autouse=True)
    def _launcher(self, words: list[str]) -> None:
        self.words = [*words, "launcher.wait=10"]  # agents outlive a killed mpirun by that


class TestMpich(TestMpi):
    launcher = "mpich"
    slow = (
        *TestMpi.slow, "test_nodes_with_another_version_of_a_package_are_refused_by_name",
        "test_a_node_that_is_told_to_go_has_the_run_save", "test_ctrl_c_saves_and_the_run_goes_on_elsewhere",
        "test_a_killed_command_takes_its_run_with_it_or_finds_it_again",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "code", "sentence"),
    [
        ("/no/mpirun", 3, "there is no /no/mpirun here. Install openmpi-bin or mpich"),
        (shutil.which("true"), 3, " is no launcher of Open MPI, MPICH, Intel MPI or Slurm"),
        ('mpirun "', 2, "No closing quotation. Quote it as in a shell"),
        ("", 2, "launcher.command is empty"),
        ("mpirun --hostfile hosts -np 4", 2, "launcher.command: '-np' is not yours to say: dtrain starts one agent on"),
        ("mpirun -H a,b --map-by ppr:8:node", 2, "launcher.command: '--map-by' is not yours to say"),
        ("mpirun --bind-to=core", 2, "launcher.command: '--bind-to=core' is not yours to say"),
        ("mpiexec.hydra -hosts a,b -ppn 8", 2, "launcher.command: '-ppn' is not yours to say"),
        ("mpirun -H a true :", 2, "launcher.command: ':' is not yours to say"),
        ("srun --mpi=pmix -N4", 2, "launcher.command: '-N4' is not yours to say"),
        ("srun --mpi=pmix --ntasks=4", 2, "'--ntasks=4' is not yours to say"),
        ("srun --output=foo", 2, "in this folder, and shows what it says"),
        ("srun --mpi=pmix -c 4 -w n1,n2 --job-name=a /no", 3, "there is no srun here"),
    ],
)
def test_what_is_no_launcher_is_refused(command: str, code: int, sentence: str, tmp_path: Path) -> None:
    words = ["launcher=mpi", f"launcher.command='{command}'", "out=a"]
    env = {**os.environ, "PATH": ""} if code == 3 else None
    done = commands.run(*SMALL, "steps=6", *words, cwd=tmp_path, env=env)
    assert done.returncode == code and sentence in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
