"""What this machine has, read from an environment."""

import pytest

from dtrain.cluster import External, look


def test_ranks_that_already_run_are_seen() -> None:
    assert look({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}).external == External(rank=3, world=8, local_world=4)


def test_without_a_local_world_size_all_ranks_are_of_one_node() -> None:
    assert look({"RANK": "0", "WORLD_SIZE": "2"}).external == External(rank=0, world=2, local_world=2)


@pytest.mark.parametrize("environ", [{}, {"RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_half_of_the_variables_mean_nothing(environ: dict[str, str]) -> None:
    assert look(environ).external is None


@pytest.mark.parametrize(("visible", "gpus"), [("0,1,2", 3), ("", 0), ("-1", 0), ("GPU-abc", 1), ("0, 1", 2)])
def test_gpus_are_those_that_are_visible(visible: str, gpus: int) -> None:
    assert look({"CUDA_VISIBLE_DEVICES": visible}).gpus == gpus


def test_there_is_at_least_one_core() -> None:
    assert look({}).cpus >= 1
