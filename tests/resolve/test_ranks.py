"""How many ranks, on what, talking through what, started by whom."""

import pytest
from small import CPUS, plan

from dtrain.cluster import Cluster, External
from dtrain.errors import WordsError

GPUS = Cluster(gpus=4, cpus=8)


def word(part: object) -> str:
    return str(part["_target_"]).split(".")[2]  # type: ignore[index]


def test_one_process_on_a_laptop() -> None:
    decided = plan()
    assert (decided.world, decided.device, decided.threads) == (1, "cpu", 8)
    assert [word(part) for part in (decided.launcher, decided.backend, decided.strategy)] == ["inline", "gloo", "single"]


def test_one_process_per_gpu() -> None:
    decided = plan(on=GPUS)
    assert (decided.world, decided.device, decided.threads) == (4, "cuda", 2)
    assert [word(part) for part in (decided.launcher, decided.backend, decided.strategy)] == ["local", "nccl", "ddp"]
    assert decided.why["devices"] == "4 (auto: one per GPU)"


def test_two_nodes_on_this_host_share_its_cores() -> None:
    assert plan("nodes=2", "devices=2").threads == 2


def test_no_choice_is_silent() -> None:
    assert set(plan("nodes=2").why) >= {"launcher", "backend", "strategy", "devices", "objective", "hook"}


def test_ranks_that_already_run_decide_nodes_and_devices() -> None:
    decided = plan(on=Cluster(gpus=0, cpus=8, external=External(rank=1, world=4, local_world=2)))
    assert (decided.nodes, decided.devices, word(decided.launcher)) == (2, 2, "external")


@pytest.mark.parametrize(
    ("words", "on", "said"),
    [
        (("devices=x",), CPUS, "Type devices=2"),
        (("devices=0",), CPUS, "devices=0"),
        (("devices=8",), GPUS, "this host has 4 GPU(s). Type devices=4"),
        (("backend=nccl",), CPUS, "Type backend=gloo"),
        (("launcher=external",), CPUS, "torchrun"),
        (("launcher=inline", "nodes=2"), CPUS, "Type launcher=local"),
        (("nodes=3",), Cluster(0, 8, External(0, 4, 2)), "Leave nodes and devices out"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(words: tuple[str, ...], on: Cluster, said: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*words, on=on)
    assert said in str(caught.value)


def test_cpu_processes_beside_gpus_are_asked_for_by_backend() -> None:
    assert plan("devices=8", "backend=gloo", on=GPUS).device == "cpu"
