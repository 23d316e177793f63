"""Ranks that somebody else started: torchrun's variables, and those of mpirun and srun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.cluster import detect
from dtrain.cluster.allocation import External, adopt
from dtrain.errors import PreflightError

MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "gpu[03-04]-ib",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "5",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_ranks_that_already_run_are_seen() -> None:
    assert detect({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", **MEET}).external == External(
        rank=3, world=8, local_world=4
    )


def test_without_a_local_world_size_all_ranks_are_of_one_node() -> None:
    assert detect({"RANK": "0", "WORLD_SIZE": "2", **MEET}).external == External(rank=0, world=2, local_world=2)


@pytest.mark.parametrize("environ", [{}, {"RANK": "0"}, {"WORLD_SIZE": "1"}])
def test_what_may_be_left_over_means_nothing(environ: dict[str, str]) -> None:
    assert detect(environ).external is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "two", **MEET}, "WORLD_SIZE=two is not a number"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MEET}, "RANK=-1 is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MEET}, "RANK=2 is not one of WORLD_SIZE=2 ranks"),
        (
            {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", **MEET},
            "is not a multiple of LOCAL_WORLD_SIZE=2, the ranks of each node",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "http"}, "MASTER_PORT=http is not a port"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "\u00b2"}, "is not a port"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x", **MEET}, "LOCAL_RANK=x is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", **MEET}, "LOCAL_RANK=2 is not one of LOCAL_WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "", **MEET}, "GROUP_RANK is not set"),
        ({**SLURM, "SLURM_NODEID": "x"}, "LOCAL_WORLD_SIZE=4(x2) is not a number"),
        ({**SLURM, "SLURM_NODEID": "9"}, "LOCAL_WORLD_SIZE=4(x2) is not a number"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, "LOCAL_WORLD_SIZE=many is not a number"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a number"),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4"},
            "PMI_SIZE=4 says that this is one of several ranks, but its launcher set no MPI_LOCALRANKID nor MPI_LOCALNRANKS",
        ),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": ""},
            "one of several ranks, but its launcher set no OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
    ],
)
def test_what_can_be_no_ranks_is_one_sentence(environ: dict[str, str], message: str) -> None:
    environ = dict(environ)
    adopt(environ)
    with pytest.raises(PreflightError) as refused:
        detect(environ)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("environ", "place", "host"),
    [
        (SLURM, External(rank=5, world=8, local_world=4), "gpu03-ib"),
        ({**SLURM, "SLURM_STEP_NODELIST": "login,gpu[1-2]"}, External(rank=5, world=8, local_world=4), "login"),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8"} | {"SLURM_NODEID": "0"},
            External(rank=5, world=8, local_world=8),
            "127.0.0.1",
        ),
        ({**SLURM, **OPEN_MPI}, External(rank=1, world=2, local_world=2), "127.0.0.1"),
        (OPEN_MPI, External(rank=1, world=2, local_world=2), "127.0.0.1"),
        (MPICH, External(rank=1, world=4, local_world=4), "127.0.0.1"),
        ({**MPICH, "MPI_LOCALNRANKS": "2", **MEET}, External(rank=1, world=4, local_world=2), "127.0.0.1"),
    ],
)
def test_ranks_of_srun_and_mpirun_are_ranks(environ: dict[str, str], place: External, host: str) -> None:
    environ = dict(environ)
    adopt(environ)
    assert detect(environ).external == place
    assert (environ["LOCAL_RANK"], environ["MASTER_ADDR"]) == ("1", host)


def test_ranks_on_several_hosts_must_be_told_where_to_meet() -> None:
    environ = {**MPICH, "MPI_LOCALNRANKS": "2"}
    adopt(environ)
    with pytest.raises(PreflightError, match="mpirun -x MASTER_ADDR=<host>"):
        detect(environ)


def test_jobs_of_one_host_meet_at_ports_of_their_own() -> None:
    jobs = [{**OPEN_MPI, "PMIX_NAMESPACE": str(number)} for number in range(20)]
    for job in jobs:
        adopt(job)
    assert len({job["MASTER_PORT"] for job in jobs}) > 15


@pytest.mark.parametrize(
    "left",
    [
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_a_single_task_a_batch_script_and_torchrun_stay_what_they_are(left: dict[str, str]) -> None:
    environ = dict(left)
    adopt(environ)
    assert environ == left


@pytest.mark.campaign("network")
def test_two_ranks_of_mpirun_train_one_run(tmp_path: Path) -> None:
    """Not two runs of one rank each, which would be silent."""
    words = [
        "model=mlp",
        "data=synthetic",
        "objective=regression",
        "strategy=ddp",
        "steps=2",
        "batch=8",
        "logger=[]",
        f"out={tmp_path / 'run'}",
    ]
    mine = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | {
        "PMIX_NAMESPACE": str(tmp_path)
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "dtrain", *words], env={**mine, **OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "2 rank(s)" in "".join(outputs)
