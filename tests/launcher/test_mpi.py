"""Nodes that the launchers of Open MPI and MPICH start: the losses of local nodes, and nothing left of them."""

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


@pytest.fixture(params=LAUNCHERS)
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    program, command, package = LAUNCHERS[request.param]
    if not shutil.which(program):
        pytest.skip(f"{program} is not here. Type: apt-get install {package}")
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    yield ["launcher=mpi", f"launcher.command='{command}'", "launcher.address=127.0.0.1"]


@pytest.mark.campaign("kills")
class TestMpi(EngineTests):
    start = Forked

    @pytest.fixture(autouse=True)
    def _launcher(self, words: list[str]) -> None:
        self.words = [*words, "launcher.wait=10"]  # agents outlive a killed mpirun by that


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
