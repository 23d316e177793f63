"""How many ranks, on what, talking through what, started by whom."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from small import CPUS, plan

from dtrain.cluster import Cluster, detect
from dtrain.cluster.allocation import External
from dtrain.errors import WordsError

CONF = Path(__file__).parents[2] / "conf"
GPUS = Cluster(gpus=4, cpus=8)
PODS, UNCOUNTED = External(1, 2, 0, kind="nodes"), External(5, 0, 0, kind="nodes")
"""One of two nodes, and one of as many as the word `nodes` says."""


def word(part: object) -> str:
    return str(part["_target_"]).split(".")[2]  # type: ignore[index]


def test_one_process_on_a_laptop() -> None:
    decided = plan()
    assert (decided.world, decided.device, decided.threads) == (1, "cpu", 8)
    assert [word(part) for part in (decided.launcher, decided.backend, decided.strategy)] == [
        "inline",
        "gloo",
        "single",
    ]


def test_one_process_per_gpu() -> None:
    decided = plan(on=GPUS)
    assert (decided.world, decided.device, decided.threads) == (4, "cuda", 2)
    assert [word(part) for part in (decided.launcher, decided.backend, decided.strategy)] == ["local", "nccl", "fsdp"]
    assert decided.why["devices"] == "4 (auto: one per GPU)"


@pytest.mark.parametrize(
    ("words", "on", "chosen", "why"),
    [
        ((), CPUS, "fp32", "fp32 (auto: on the CPU)"),
        ((), GPUS, "bf16", "bf16 (auto: on a GPU)"),
        (("backend=gloo",), GPUS, "fp32", "fp32 (auto: on the CPU)"),
        (("cluster=h100x8",), CPUS, "bf16", "bf16 (auto: on a GPU)"),
        (
            (),
            Cluster(gpus=4, cpus=8, gpu="Tesla V100-SXM2-32GB", capability=7.0),
            "fp32",
            "fp32 (auto: bf16 is no faster on this GPU; precision=fp16 may be)",
        ),
        ((), Cluster(gpus=4, cpus=8, gpu="NVIDIA A10G", capability=8.6), "bf16", "bf16 (auto: on a GPU)"),
        (
            ("cluster=h100x8", "cluster.flops.bf16=6e+13"),
            CPUS,
            "fp32",
            "fp32 (auto: bf16 is no faster on this GPU; precision=fp16 may be)",
        ),
        (("precision=fp32",), GPUS, "fp32", None),
        (("precision=tf32",), GPUS, "tf32", None),
    ],
)
def test_products_are_of_bf16_on_gpus_that_have_it(
    words: tuple[str, ...], on: Cluster, chosen: str, why: str | None
) -> None:
    decided = plan(*words, "model.width=4096", "batch=256", on=on)
    assert word(decided.precision) == chosen
    assert decided.why.get("precision") == why


def test_two_nodes_on_this_host_share_its_cores() -> None:
    assert plan("nodes=2", "devices=2").threads == 2


def test_the_word_decides_the_threads_and_before_the_cores_the_environment_does() -> None:
    cluster = Cluster(gpus=0, cpus=8, threads=3)
    assert plan("devices=2", on=cluster).threads == 3
    assert plan("devices=2", "threads=5", on=cluster).threads == 5
    for variable, threads in {"3": 3, "2,4": 2, "": None, "0": None, "many": None}.items():
        assert detect({"OMP_NUM_THREADS": variable}).threads == threads


def test_no_choice_is_silent() -> None:
    assert set(plan("nodes=2").why) >= {"launcher", "backend", "strategy", "devices", "objective", "hook"}


def test_ranks_that_already_run_decide_nodes_and_devices() -> None:
    decided = plan(on=Cluster(gpus=0, cpus=8, external=External(rank=1, world=4, local_world=2)))
    assert (decided.nodes, decided.devices, word(decided.launcher)) == (2, 2, "external")


@pytest.mark.parametrize(
    ("words", "on", "message"),
    [
        (("devices=x",), CPUS, "Type devices=auto"),
        (("devices=0",), CPUS, "devices=0"),
        (("devices=8",), GPUS, "this host has 4 GPU(s). Type devices=4"),
        (("backend=nccl",), CPUS, "Type backend=gloo"),
        (("precision=tf32",), CPUS, "precision=tf32 needs cuda, this run is on cpu. Type precision=bf16."),
        (("launcher=external",), CPUS, "torchrun"),
        (("launcher=inline", "nodes=2"), CPUS, "Type launcher=local"),
        (("nodes=3",), Cluster(0, 8, External(0, 4, 2)), "Leave nodes and devices out"),
        (("nodes='3:4'",), Cluster(0, 8, External(0, 4, 2)), "Leave nodes and devices out"),
        (("devices=2",), Cluster(0, 8, External(0, 4, 4)), "one of 4 ranks, 4 per node"),
        (("launcher=external", "launcher.restarts=1"), Cluster(0, 8, External(0, 4, 2)), "torchrun restarts its ranks"),
        (("launcher=local", "nodes=2"), Cluster(0, 8, PODS), "one of 2 nodes already"),
        (("nodes=3",), Cluster(0, 8, PODS), "one of 2 nodes (RANK and WORLD_SIZE). Leave nodes out"),
        (("nodes=2",), Cluster(0, 8, UNCOUNTED), "counts from 0. Type nodes=<completions of the job>"),
        ((), Cluster(0, 8, External(0, 4, 0)), "how many run on each node is not. Type devices=<ranks per node>"),
        (("nodes=3",), Cluster(0, 8, External(0, 4, 0)), "Type devices=<ranks per node>"),
        (("nodes='2:1'",), CPUS, "such as 1:2. Type nodes=1:2"),
        (("nodes=two",), CPUS, "such as 1:2. Type nodes=1"),
        (("nodes='1:2'", "mesh.pp=2"), CPUS, "with nodes=1: mesh: pp=2 is 2 ranks"),
        (
            ("nodes='1:2'",),
            Cluster(0, 8, External(0, 4, 2, one_store=True)),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_type(words: tuple[str, ...], on: Cluster, message: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*words, on=on)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "on", "shape", "launcher"),
    [
        ((), Cluster(0, 8, PODS), (2, 1, [2]), "external"),
        (("devices=2",), Cluster(0, 8, PODS), (2, 2, [2]), "external"),
        ((), Cluster(0, 8, PODS, devices=4), (2, 4, [2]), "external"),
        (("devices=2",), Cluster(0, 8, PODS, devices=4), (2, 2, [2]), "external"),
        (("nodes='1:2'",), Cluster(0, 8, PODS), (2, 1, [1, 2]), "external"),
        ((), Cluster(0, 8, replace(PODS, least=1)), (2, 1, [1, 2]), "external"),
        ((), Cluster(0, 8, devices=2), (1, 2, [1]), "local"),
        (("nodes=8",), Cluster(0, 8, UNCOUNTED), (8, 1, [8]), "external"),
        (("nodes='7:8'",), Cluster(0, 8, UNCOUNTED), (8, 1, [7, 8]), "external"),
        (("nodes=4", "launcher=local"), Cluster(0, 8, UNCOUNTED), (4, 1, [4]), "local"),
        ((), Cluster(0, 8, UNCOUNTED), (1, 1, [1]), "inline"),
        (("devices=2",), Cluster(0, 8, External(0, 4, 0)), (2, 2, [2]), "external"),
        (("nodes=2",), Cluster(0, 8, External(0, 4, 0)), (2, 2, [2]), "external"),
        ((), Cluster(2, 8, External(0, 4, 0), gpu="NVIDIA L4"), (2, 2, [2]), "external"),
    ],
)
def test_nodes_that_somebody_else_started_are_the_nodes_of_the_plan(
    words: tuple[str, ...], on: Cluster, shape: tuple[int, int, list[int]], launcher: str
) -> None:
    decided = plan("batch=168", *words, on=on)
    assert (decided.nodes, decided.devices, decided.allowed) == shape
    assert word(decided.launcher) == launcher


def test_cpu_processes_beside_gpus_are_asked_for_by_backend() -> None:
    assert plan("devices=8", "backend=gloo", on=GPUS).device == "cpu"


def test_every_number_of_nodes_has_its_plan_with_the_same_batch() -> None:
    decided = plan("nodes='2:4'", "devices=2", "batch=48", "strategy=fsdp")
    assert (decided.nodes, decided.allowed) == (4, [2, 3, 4])
    assert {decided.on(nodes).batch.size for nodes in decided.allowed} == {48}
    assert [decided.on(nodes).mesh.dp_shard for nodes in (4, 3, 2)] == [8, 6, 4]
    assert [decided.on(nodes).batch.microbatch for nodes in (4, 3, 2)] == [6, 4, 6], "no rank holds more of it at once"
    assert {decided.on(nodes).out for nodes in decided.allowed} == {decided.out}
    assert {word(decided.on(nodes).launcher) for nodes in decided.allowed} == {"local"}
    assert len({decided.on(nodes).threads for nodes in decided.allowed}) == 1


def test_a_batch_made_of_its_parts_stays_that_of_all_nodes() -> None:
    decided = plan("nodes='1:2'", "microbatch=3", "accumulate=2")
    assert [(shape.size, shape.microbatch, shape.accumulate) for shape in (decided.batch, decided.on(1).batch)] == [
        (12, 3, 2),
        (12, 3, 4),
    ]


def test_ranks_of_torchrun_take_the_plan_of_the_nodes_that_are_there() -> None:
    decided = plan("nodes='1:2'", on=Cluster(gpus=0, cpus=8, external=External(rank=1, world=2, local_world=2)))
    assert (decided.nodes, decided.devices, decided.others) == (1, 2, ())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("cluster=a100x8", "precision=fp8"),
            "precision=fp8: cluster=a100x8 has no products in fp8, only in fp32, tf32, bf16, fp16. Type precision=bf16.",
        ),
        (("cluster=v100x8", "precision=bf16"), "no products in bf16, only in fp32, fp16. Type precision=fp16."),
        (("cluster=v100x8", "precision=bf16_true"), "no products in bf16"),
        (("cluster=v100x8", "precision=tf32"), "no products in tf32"),
    ],
)
def test_a_precision_that_the_gpus_lack_is_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = (CONF / "cluster/a100x8.yaml").read_text()
    older = re.sub("flops: {.*?}", "flops: {fp32: 1.57e+13, fp16: 1.25e+14}", word)
    (tmp_path / "conf/cluster").mkdir(parents=True)
    (tmp_path / "conf/cluster/v100x8.yaml").write_text(older)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WordsError, match=re.escape(message)):
        plan(*words)
    for precision in ("auto", "fp32", "fp16"):
        assert plan("cluster=v100x8", f"precision={precision}").device == "cuda"


@pytest.mark.parametrize("word", ["a100x8", "h100x8", "h200x8", "b200x8", "l40sx8", "mi300x8"])
def test_every_gpu_has_the_types_that_it_states(word: str) -> None:
    for precision in ("fp32", "tf32", "bf16", "bf16_true", "fp16", *["fp8"] * (word != "a100x8")):
        assert plan(f"cluster={word}", f"precision={precision}", "strategy=fsdp", "batch=8").device == "cuda"
