"""backend=mpi under the launchers of Open MPI and MPICH: its operations, the layouts of the invariance suite, and the
command itself.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from integrations.mpi.ranks import LAYOUTS
from invariance.layouts import MODELS
from invariance.run import reference, worst
from invariance.test_layouts import GRADIENT, LOSS, NORM, WEIGHT

TESTS = Path(__file__).parents[2]
LAUNCHERS = {
    "openmpi": (["mpirun.openmpi", "--oversubscribe", "-np"], "openmpi-bin"),
    "mpich": (["mpiexec.hydra", "-n"], "mpich"),
}
RUN = (
    "model=mlp", "data=synthetic", "objective=regression", "strategy=fsdp", "batch=8", "logger=[]", "hook=[]",
    "checkpoint.every=2",
)  # fmt: skip


@pytest.fixture(params=["openmpi", pytest.param("mpich", marks=pytest.mark.slow)])
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The command, without the number of ranks, and its variables."""
    pytest.importorskip("mpi4py", reason="Type: pip install mpi4py")
    command, package = LAUNCHERS[request.param]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not here. Type: apt-get install {package}")
    environment = {
        **os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}", "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip
    yield command, {**environment, "LD_LIBRARY_PATH": str(_named(tmp_path))}


def _named(folder: Path) -> Path:
    """A folder where Debian's MPICH has the name of its library that mpi4py looks for."""
    library = next(iter(sorted(Path("/usr/lib").glob("*/libmpich.so.12"))), None)
    if library:
        (folder / "lib").mkdir()
        (folder / "lib" / "libmpi.so.12").symlink_to(library)
    return folder / "lib"


def ranks(
    launcher: tuple[list[str], dict[str, str]], number: int, *program: str, cwd: Path
) -> "subprocess.CompletedProcess[str]":
    command, environment = launcher
    return subprocess.run(
        [*command, str(number), sys.executable, "-W", "ignore", *program], env=environment, cwd=cwd, timeout=300,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.campaign("network")
def test_every_operation_on_every_type(launcher: Any, tmp_path: Path) -> None:
    done = ranks(launcher, 4, str(TESTS / "integrations/mpi/ranks.py"), "collectives", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.campaign("network")
def test_layouts_have_the_numbers_of_one_process(launcher: Any, tmp_path: Path) -> None:
    done = ranks(launcher, 4, str(TESTS / "integrations/mpi/ranks.py"), "layouts", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for number, (model, words) in enumerate(LAYOUTS):
        found = worst(_whole([torch.load(tmp_path / f"{number}-{rank}.pt") for rank in range(4)]), _one(model))
        assert found["losses"] <= LOSS and found["norm"] <= NORM, (words, found)
        assert found["gradients"] <= GRADIENT and found["weights"] <= WEIGHT, (words, found)


@cache
def _one(model: str) -> dict[str, Any]:
    return reference(MODELS[model], 3)


def _whole(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    assert all(each["losses"] == told[0]["losses"] and each["norms"] == told[0]["norms"] for each in told)
    parts = ("gradients", "weights")
    return {
        **told[0], **{part: {name: value for each in told for name, value in each[part].items()} for part in parts}
    }  # fmt: skip


@pytest.mark.campaign("network")
def test_who_does_not_come_is_an_error_in_time(launcher: Any, tmp_path: Path) -> None:
    begun = time.monotonic()
    done = ranks(launcher, 2, str(TESTS / "integrations/mpi/ranks.py"), "late", str(tmp_path), cwd=tmp_path)
    assert done.returncode != 0 and time.monotonic() - begun < 45, done.stderr
    facts = json.loads((tmp_path / "late-0.json").read_text())
    assert facts["error"].startswith("MPI: all_reduce number 1 of ") and facts["seconds"] < 10
    assert "timed out waiting 3000ms: this rank has entered it, and another has not" in facts["error"]


@pytest.mark.campaign("network")
def test_ranks_that_disagree_about_what_they_send_are_an_error(launcher: Any, tmp_path: Path) -> None:
    done = ranks(launcher, 2, str(TESTS / "integrations/mpi/ranks.py"), "apart", str(tmp_path), cwd=tmp_path)
    assert done.returncode != 0, done.stderr
    told = [json.loads(path.read_text())["error"] for path in tmp_path.glob("apart-*.json")]
    assert told and all("all_to_all: ranks send [1, 2] values, not [2, 2]" in each for each in told), told


@pytest.mark.campaign("network")
def test_a_run_saves_and_goes_on_with_the_losses_of_local_ranks(launcher: Any, tmp_path: Path) -> None:
    for steps in (4, 6):
        words = ("-m", "dtrain", *RUN, f"steps={steps}", "schedule=constant", "backend=mpi", "out=far")
        done = ranks(launcher, 2, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "backend     mpi" in done.stdout
    near = commands.run(*RUN, "steps=6", "schedule=constant", "devices=2", "out=near", cwd=tmp_path)
    assert near.returncode == 0, near.stderr
    rows = [
        [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        for out in ("far", "near")
    ]
    assert [row["step"] for row in rows[0]] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows[0]] == pytest.approx([row["loss"] for row in rows[1]], rel=LOSS)
    assert "start" in json.dumps(
        [json.loads(line) for line in (tmp_path / "far" / "events.jsonl").read_text().splitlines()]
    )


@pytest.mark.campaign("kills")
def test_the_error_of_a_rank_ends_all_and_is_shown(launcher: Any, tmp_path: Path) -> None:
    fault = (
        "hook.fault._target_=dtrain.testing.faults.AtStep",
        "hook.fault.action=raise",
        "hook.fault.step=3",
        "hook.fault.rank=1",
    )
    words = [word for word in RUN if word != "hook=[]"]
    done = ranks(launcher, 2, "-m", "dtrain", *words, *fault, "steps=20", "backend=mpi", "out=run", cwd=tmp_path)
    assert done.returncode not in (0, 75), done.stdout
    assert "rank 1 failed after step 3: FaultError: an injected fault" in done.stderr, done.stderr
    assert "FaultError" in (tmp_path / "run" / "failure.json").read_text()


@pytest.mark.often("openmpi-mpi")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_a_rank_that_hangs_is_the_cause(backend: str, launcher: Any, tmp_path: Path) -> None:
    fault = ("hook.fault._target_=dtrain.testing.faults.AtStep", "hook.fault.action=hang", "hook.fault.step=3")
    more = ("hook.fault.rank=1", "steps=20", f"backend={backend}", "backend.timeout=4", "out=run")
    words = [word for word in RUN if word != "hook=[]"]
    done = ranks(launcher, 2, "-m", "dtrain", *words, *fault, *more, cwd=tmp_path)
    assert done.returncode not in (0, 75), done.stdout
    facts = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (facts["rank"], facts["kind"]) == (1, "hung") and "GIL" not in facts["message"], facts["message"]
    assert "faults.py" in facts["where"], facts["where"]


@pytest.mark.campaign("network")
def test_another_library_than_the_launchers_is_refused(launcher: Any, tmp_path: Path) -> None:
    command, environment = launcher
    other = {"mpirun.openmpi": "libmpich.so.12", "mpiexec.hydra": "libmpi.so.40"}[command[0]]
    mixed = (command, {**environment, "MPI4PY_LIBMPI": other})
    done = ranks(mixed, 2, "-m", "dtrain", *RUN, "steps=2", "backend=mpi", "out=run", cwd=tmp_path)
    assert done.returncode == 3 and "backend=mpi: this is rank" in done.stderr, done.stderr
    assert "Set MPI4PY_LIBMPI=" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("devices=2",), "backend=mpi: its ranks are started by Open MPI or MPICH, and nothing has started ranks here"),
        (("devices=2", "launcher=mpi"), "Type mpirun -np <ranks> python -m dtrain backend=mpi"),
        ((), "backend=mpi: its ranks are started by Open MPI or MPICH"),
        (("backend.timeout=0",), "backend.timeout"),
    ],
)
def test_ranks_that_mpirun_did_not_start_are_refused(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = commands.run(*RUN, "steps=2", "backend=mpi", "strategy=ddp", *words, "out=run", cwd=tmp_path)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not [*tmp_path.iterdir()]


def test_ranks_of_torchrun_are_refused(tmp_path: Path) -> None:
    place = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    done = commands.run(*RUN, "steps=2", "backend=mpi", "out=run", cwd=tmp_path, env={**os.environ, **place})
    assert done.returncode == 2 and "and torch started this process" in done.stderr, done.stderr
