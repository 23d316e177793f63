"""Ranks that somebody else started: torchrun's variables, and those of mpirun and srun."""

import pytest

from dtrain.cluster import detect
from dtrain.cluster.allocation import External, adopt, external
from dtrain.errors import EnvironError

MEET = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-04]-ib",
}  # fmt: skip
ALONE = {
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
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
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "http"}, "MASTER_PORT=http is not a port"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "\u00b2"}, "is not a port"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x", **MEET}, "LOCAL_RANK=x is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", **MEET}, "LOCAL_RANK=2 is not one of WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "", **MEET}, "GROUP_RANK is not set"),
        ({**SLURM, "SLURM_NODEID": "x"}, "SLURM_NODEID=x is not a number"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE=many is not a list of tasks"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE=two is not a number"),
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
    with pytest.raises(EnvironError) as refused:
        detect(environ)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (SLURM, External(rank=5, world=8, local_world=4)),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, External(rank=5, world=8, local_world=8)),
        ({**OPEN_MPI, **SLURM, **ALONE}, External(rank=1, world=2, local_world=2)),
        (OPEN_MPI, External(rank=1, world=2, local_world=2)),
        (MPICH, External(rank=1, world=4, local_world=4)),
        ({**MPICH, "MPI_LOCALNRANKS": "2", **MEET}, External(rank=1, world=4, local_world=2)),
    ],
)
def test_a_rank_has_the_variables_of_torchrun(environ: dict[str, str], place: External) -> None:
    seen = detect(environ).external
    assert seen == place
    of_torch = dict(environ)
    adopt(of_torch, seen, local_world=place.local_world)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [of_torch[name] for name in names] == [str(place.rank), str(place.world), "1", str(place.local_world)]
    assert external(of_torch) == place, "and is still the same one"


@pytest.mark.parametrize(("rank", "own"), [("0", "0"), ("1", "1"), ("2", "0"), ("5", "1")])
def test_a_launcher_that_gives_no_local_rank_fills_one_host_after_the_other(rank: str, own: str) -> None:
    environ = {"RANK": rank, "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", **MEET}
    place = external(environ)
    assert place
    adopt(environ, place, local_world=2)
    assert environ["LOCAL_RANK"] == own


@pytest.mark.parametrize(
    "left",
    [
        {**SLURM, **ALONE},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_a_single_task_and_a_batch_script_are_single_processes(left: dict[str, str]) -> None:
    assert external(left) is None
