"""What this machine has, read from an environment."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from small import composed

from dtrain import cluster
from dtrain.build import build
from dtrain.cluster import Cluster, Machine, detect
from dtrain.errors import PreflightError, WordsError
from dtrain.launcher import preflight
from dtrain.recipe import folder
from dtrain.resolve import resolve

HERE = Cluster(gpus=0, cpus=4)
WORDS = sorted(path.stem for path in (folder("conf") / "cluster").glob("*.yaml") if path.stem != "auto")


def machine(word: str) -> Machine:
    made: Machine = build(yaml.safe_load((folder("conf") / "cluster" / f"{word}.yaml").read_text()))
    return made


A, B = "GPU-5f1c7a1e-0f33-4a1c-9d1c-3c1b9f4f1a10", "GPU-9b0e42d2-77aa-4c55-8e10-2f0c6d7e8b21"
M = "MIG-7c2d9a34-5b1f-5e2a-9a6b-0d8c3f4e1b77"
H100 = "NVIDIA H100 80GB HBM3"
TWO = f"0, {A}, 81559, {H100}\n1, {B}, 81559, {H100}\n"
MIXED = f"0, {A}, 81559, {H100}\n1, {B}, 24564, NVIDIA L4\n"
PARTS = f"GPU 0: {H100} (UUID: {A})\n  MIG 1g.10gb     Device  0: (UUID: {M})\n"
GIB80, GIB24, UNKNOWN = 81559 << 20, 24564 << 20, 16 << 30


@pytest.mark.parametrize(
    ("visible", "told", "memories", "name"),
    [
        ("0,1", TWO, [GIB80, GIB80], H100),
        ("1", MIXED, [GIB24], "NVIDIA L4"),
        ("0", MIXED, [GIB80], H100),
        ("0, 1", MIXED, [GIB80, GIB24], H100),
        ("1,0", MIXED, [GIB24, GIB80], "NVIDIA L4"),
        (A, TWO, [GIB80], H100),
        (f"{B},{A}", MIXED, [GIB24, GIB80], "NVIDIA L4"),
        ("GPU-9b0e", MIXED, [GIB24], "NVIDIA L4"),  # the beginning is enough for CUDA
        (M, PARTS, [10 * 10**9], "MIG 1g.10gb"),
        (f"{M},MIG-other", PARTS, [10 * 10**9], "MIG 1g.10gb"),
        (M, "", [UNKNOWN], ""),
        ("", TWO, [], ""),
        ("-1", TWO, [], ""),
        ("0,-1,1", TWO, [GIB80], H100),  # CUDA reads no further
        ("NoDevFiles", TWO, [], ""),  # what Slurm says of GPUs without files
        ("void", TWO, [], ""),  # what NVIDIA's containers say
        ("0,0", TWO, [], ""),
        ("0,5,1", TWO, [GIB80], H100),
        ("7", TWO, [], ""),
        ("0,1,2", None, [UNKNOWN] * 3, ""),  # the driver does not answer
        (None, TWO, [GIB80, GIB80], H100),
        (None, f"0, {A}, 81559, {H100}\n", [GIB80], H100),  # two files, of which a control group opens one
        (None, f"0, {A}, [N/A], NVIDIA GB10\n", [UNKNOWN] * 2, ""),
    ],
)
def test_gpus_are_those_that_cuda_lets_this_process_use(
    visible: str | None,
    told: str | None,
    memories: list[int],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def smi(command: list[str], **_: object) -> SimpleNamespace:
        if told is None:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=told)

    monkeypatch.setattr(cluster.subprocess, "run", smi)
    for file in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / file).touch()
    monkeypatch.setattr(cluster, "FILES", tmp_path)
    seen = detect({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (seen.gpus, seen.gpu) == (len(memories), name)
    if memories:
        assert seen.memory == min(memories)


@pytest.mark.parametrize(("knows", "capability"), [(True, 7.0), (False, 0.0)])
def test_the_oldest_gpu_says_what_all_can(knows: bool, capability: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the driver is one that does not know how to say it."""

    def smi(command: list[str], **_: object) -> SimpleNamespace:
        if "compute_cap" in command[1] and not knows:
            raise subprocess.CalledProcessError(2, command)
        rows = (("0", A, "32768", "Tesla V100-SXM2-32GB", "[N/A]", "7.0"), ("1", B, "81559", H100, "Disabled", "9.0"))
        return SimpleNamespace(
            stdout="".join(", ".join(row if "compute_cap" in command[1] else row[:4]) + "\n" for row in rows)
        )

    monkeypatch.setattr(cluster.subprocess, "run", smi)
    seen = detect({"CUDA_VISIBLE_DEVICES": "0,1"})
    assert (seen.gpus, seen.memory, seen.capability) == (2, 32 << 30, capability)


def full(*rows: str) -> str:
    """As a driver of today tells of them."""
    return "".join(f"{row}\n" for row in rows)


L4, DIVIDED = "NVIDIA L4", full(f"0, {A}, 81559, {H100}, Enabled, 9.0", f"1, {B}, 81559, {H100}, Disabled, 9.0")
FOUR = full(*(f"{index}, GPU-{index}{A[5:]}, 23034, {L4}, [N/A], 8.9" for index in range(4)))
ONE = full(f"0, {A}, 81559, {H100}, Disabled, 9.0")
PLACE = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0",
         "SLURM_STEP_NODELIST": "gpu03", "SLURM_GPUS_ON_NODE": "4"}  # fmt: skip
RAY = {**PLACE, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "RAY_JOB_ID": "01000000"}


@pytest.mark.parametrize(
    ("environ", "files", "told", "gpus", "gib"),
    [
        # srun --gpus-per-task=1, and --gpu-bind=single:1: a control group hides the others, and each task counts from 0
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "0", "SLURM_STEP_GPUS": "3"}, ["nvidia0", "nvidia1", "nvidia2", "nvidia3"], full(f"0, {A}, 23034, {L4}, [N/A], 8.9"), 4, 22),
        # the same where no control group is set up (ConstrainDevices=no): the task's own number among all
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "3"}, ["nvidia0", "nvidia1", "nvidia2", "nvidia3"], FOUR, 4, 22),
        # --gpu-bind=none, or --gres=gpu:4 alone: each task sees all
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ["nvidia0", "nvidia1", "nvidia2", "nvidia3"], FOUR, 4, 22),
        # a job that was given none
        ({**SLURM, "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ["nvidia0"], ONE, 0, 0),
        # Ray Train shows the workers of a node the GPUs of all of them, in the order in which they were given out
        ({**RAY, "CUDA_VISIBLE_DEVICES": "2,0,1,3"}, ["nvidia0", "nvidia1", "nvidia2", "nvidia3"], FOUR, 4, 22),
        # the same with TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES=0, and an actor of num_gpus=0
        ({**RAY, "CUDA_VISIBLE_DEVICES": "3"}, ["nvidia0", "nvidia1", "nvidia2", "nvidia3"], FOUR, 4, 22),
        ({"RAY_JOB_ID": "01000000", "CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], ONE, 0, 0),
        # the device plugin of Kubernetes names it to the container's runtime alone; its file keeps the number of the host, nvidia-smi counts from 0
        ({"NVIDIA_VISIBLE_DEVICES": A, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, ["nvidia5", "nvidiactl"], ONE, 1, 79),
        ({"NVIDIA_VISIBLE_DEVICES": "void", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, ["nvidia5", "nvidiactl"], ONE, 1, 79),  # by CDI
        ({"NVIDIA_VISIBLE_DEVICES": "void", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, [], None, 0, 0),  # it asked for none
        ({"NVIDIA_VISIBLE_DEVICES": A, "NVIDIA_DRIVER_CAPABILITIES": "compute"}, ["nvidia5"], None, 1, 16),  # without nvidia-smi
        # of divided GPUs CUDA uses the first part, and no whole one beside it
        ({}, ["nvidia0", "nvidia1"], DIVIDED, 1, 9),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ["nvidia0", "nvidia1"], DIVIDED, 1, 9),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["nvidia0", "nvidia1"], DIVIDED, 1, 79),
        # WSL has no files by number; other makers' GPUs have its one, too
        ({"WSL_DISTRO_NAME": "Ubuntu"}, ["dxg"], full(f"0, {A}, 24564, NVIDIA GeForce RTX 4090, [N/A], 8.9"), 1, 23),
        ({"WSL_DISTRO_NAME": "Ubuntu"}, ["dxg"], None, 0, 0),
    ],
)  # fmt: skip
def test_gpus_as_launchers_containers_and_windows_show_them(
    environ: dict[str, str],
    files: list[str],
    told: str | None,
    gpus: int,
    gib: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`gpus` on this host, for all ranks that were started here, `gib` each."""

    def smi(command: list[str], **_: object) -> SimpleNamespace:
        if told is None:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=PARTS if command[1] == "-L" else told)

    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(cluster.subprocess, "run", smi)
    monkeypatch.setattr(cluster, "FILES", tmp_path)
    seen = detect(environ)
    assert (seen.gpus, seen.memory >> 30 if seen.gpus else 0) == (gpus, gib)


def test_the_program_of_windows_driver_is_found_outside_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "wsl" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '0, {A}, 24564, NVIDIA GeForce RTX 4090, [N/A], 8.9'\n")
    program.chmod(0o755)
    (tmp_path / "dxg").touch()
    monkeypatch.setattr(cluster, "FILES", tmp_path)
    monkeypatch.setattr(cluster, "WSL_NVIDIA_SMI", program)
    monkeypatch.setattr(cluster.shutil, "which", lambda name: None)
    assert detect({}).gpu == "NVIDIA GeForce RTX 4090"


def test_there_is_at_least_one_core() -> None:
    assert detect({}).cpus >= 1


@pytest.mark.parametrize("word", WORDS)
def test_the_figures_of_a_machine_are_of_the_right_size(word: str) -> None:
    """A slip of a unit, or of both directions for one, is a factor of two or a thousand."""
    there = machine(word)
    if there.gpus:
        assert 40e9 < there.memory < 300e9
        assert 100 < there.flops["bf16"] / there.bandwidth < 500, "operations for each byte that memory moves"
        assert there.flops["bf16"] > 3 * there.flops["fp32"], "products in fp32 are not those of the tensor cores"
        assert there.flops.get("fp8", 2 * there.flops["bf16"]) == pytest.approx(2 * there.flops["bf16"], rel=0.02)
    assert there.intra_node > there.inter_node
    assert there.intra_node_latency < there.inter_node_latency
    assert 0.3 <= there.efficiency < 1


@pytest.mark.parametrize("word", [word for word in WORDS if word != "laptop"])
def test_a_plan_is_made_for_a_machine_that_is_not_here(word: str) -> None:
    plan = resolve(composed(f"cluster={word}", "strategy=fsdp", "nodes=2", "batch=64"), HERE)
    assert (plan.device, plan.devices, plan.world) == ("cuda", 8, 16)


def test_a_plan_for_another_machine_is_not_run() -> None:
    plan = resolve(composed("cluster=h100x8", "batch=64"), HERE)
    with pytest.raises(PreflightError, match=r"no GPU, not 8 x H100\. Type dtrain plan"):
        preflight.check(plan)


@pytest.mark.parametrize(
    ("words", "gpus", "told"),
    [
        (["nodes=2", "devices=4"], 8, ""),
        (
            ["nodes=2", "devices=8"],
            8,
            "2 nodes are on this host, which has 8 GPU(s). Type devices=4, nodes=1, launcher.here=1",
        ),
        (["nodes=2", "devices=1"], 1, "2 nodes are on this host, which has 1 GPU(s). Type nodes=1, launcher.here=1"),
        (
            ["nodes=4", "devices=8", "launcher.here=2"],
            8,
            "2 nodes are on this host, which has 8 GPU(s). Type devices=4",
        ),
        (["nodes=2", "devices=8", "launcher.here=1"], 8, ""),
        (["nodes=2", "devices=8", "backend=gloo"], 8, ""),
    ],
)
def test_nodes_on_one_host_need_gpus_for_all_of_them(
    words: list[str], gpus: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Cluster(gpus=gpus, cpus=64, gpu=H100)
    plan = resolve(composed("batch=64", "strategy=ddp", "launcher=local", *words), here)
    monkeypatch.setattr(preflight, "detect", lambda: here)
    said = "\n".join(each for each in preflight.missing(plan) if "GPU" in each)
    assert told in said
    assert bool(said) == bool(told)


def test_a_machine_is_known_by_the_name_of_its_gpus() -> None:
    there = machine("h100x8")
    assert not there.missing(Cluster(gpus=8, cpus=112, gpu="NVIDIA H100 80GB HBM3"))
    assert "4 x NVIDIA H100" in there.missing(Cluster(gpus=4, cpus=112, gpu="NVIDIA H100 80GB HBM3"))
    assert "8 x NVIDIA A100" in there.missing(Cluster(gpus=8, cpus=112, gpu="NVIDIA A100-SXM4-80GB"))
    assert "has a GPU" in machine("laptop").missing(Cluster(gpus=1, cpus=8, gpu="NVIDIA L4"))


def test_auto_takes_the_figures_of_what_is_here() -> None:
    seen = Cluster(gpus=2, cpus=32, memory=79 << 30, gpu="NVIDIA H200")
    plan = resolve(composed("batch=8", "strategy=ddp", "devices=2"), seen)
    assert (plan.cluster["gpu"], plan.cluster["gpus"], plan.cluster["memory"]) == ("H200", 2, 79 << 30)
    assert plan.why["cluster"].startswith("h200x8 (auto: ")


def test_of_a_gpu_without_a_word_nothing_is_claimed() -> None:
    plan = resolve(composed("batch=8", "devices=1"), Cluster(gpus=1, cpus=8, gpu="NVIDIA GeForce RTX 3060"))
    assert plan.cluster == {}
    assert "RTX 3060" in plan.why["cluster"]


def test_figures_that_are_none_are_refused() -> None:
    for word, allowed in {
        "cluster.bandwidth=0": ">= 1",
        "cluster.flops.bf16=0": "from 1e\\+06",
        "cluster.flops.bf16=1e-300": "from 1e\\+06 to 1e\\+21, per second",
        "cluster.flops.bf16=1e+22": "from 1e\\+06 to 1e\\+21, per second",
        "cluster.memory=1e30": "> 0 and <= 10000000000000000, in bytes",
        "cluster.price=1e300": "> 0 and <= 1000000000 or null",
        "cluster.efficiency=1e-300": ">= 0.001 and <= 1",
        "cluster.start=1e300": ">= 0 and <= 3600, in seconds",
    }.items():
        with pytest.raises(WordsError, match=rf"{re.escape(word)}.*a number {allowed}"):
            resolve(composed("cluster=h100x8", word, "batch=64"), HERE)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cluster.memory=40GB"], "Type cluster.memory=40000000000"), (["cluster.memory=79GiB"], f"Type cluster.memory={79 << 30}"),
        (["cluster.gpus=two"], "cluster.gpus is an integer"), (["cluster.flops.bf12=1e15"], "no such type. Did you mean bf16?"),
        (["devices=16"], "a node of cluster=h100x8 has 8 GPU(s). Type nodes=2 devices=8"),
    ],
)  # fmt: skip
def test_wrong_figures_of_a_machine_are_told(words: list[str], told: str) -> None:
    with pytest.raises(WordsError) as error:
        resolve(composed("cluster=h100x8", *words), HERE)
    assert told in str(error.value)


def test_nodes_of_a_named_machine_share_no_cores() -> None:
    threads = [
        resolve(composed("cluster=h100x8", f"nodes={nodes}", "batch=128", "strategy=fsdp"), HERE).threads
        for nodes in (1, 16)
    ]
    assert threads == [14, 14]
