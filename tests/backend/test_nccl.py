"""Collectives between GPUs, beside those on the CPU; how a rank allocates, and where it runs."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from small import composed, plan

from dtrain.backend import nccl, process_group
from dtrain.backend.nccl import Nccl, add_in_one_order, cores_near, expand_segments, gpu_of, run_on
from dtrain.build import build
from dtrain.cluster import Cluster, detect
from dtrain.compose import provenance
from dtrain.errors import PreflightError, WordsError
from dtrain.lifecycle import failure
from dtrain.resolve import resolve

GPUS = Cluster(gpus=8, cpus=64, gpu="NVIDIA H100 80GB HBM3")
DECIDED = ("backend.connect", "backend.segments", "backend.cores")


def why(*words: str, cluster: Cluster = GPUS) -> dict[str, tuple[str, str]]:
    config = composed("batch=16", "strategy=ddp", *words)
    reasons = provenance.rows(config, resolve(config, cluster))
    return {row.key: (row.value, row.source) for row in reasons if row.key in DECIDED}


def test_how_gpus_connect_allocate_and_are_reached_is_decided_and_told() -> None:
    reasons = why("devices=8")
    assert [reasons[key][0] for key in DECIDED] == ["start", "expandable", "near"]
    assert all(source.startswith("auto: ") for _, source in reasons.values())
    assert why("devices=1")["backend.connect"][0] == "use", "one GPU has nobody to connect to"


def test_what_was_said_stays() -> None:
    reasons = why("devices=8", "backend=nccl", "backend.connect=use", "backend.segments=fixed", "backend.cores=any")
    assert reasons == {
        key: (value, "command line") for key, value in zip(DECIDED, ("use", "fixed", "any"), strict=True)
    }


def test_nothing_of_it_is_decided_on_the_cpu() -> None:
    assert why("devices=2", cluster=Cluster(gpus=0, cpus=4)) == {}


def test_a_gpu_is_given_to_torch_where_it_is_to_connect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch connects no GPU that it was not given."""
    devices = list[object]()

    def begin(*_: object, device_id: object, **__: object) -> None:
        devices.append(device_id)
        raise ConnectionError

    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
    monkeypatch.setenv("LOCAL_RANK", "3")
    for connect in ("start", "use"):
        with (
            pytest.raises(ConnectionError),
            Nccl(timeout=5, connect=connect, segments="fixed", cores="any", kernels="fast").open(),
        ):
            pass
    with pytest.raises(ConnectionError), process_group("gloo", timeout=5):
        pass
    assert devices == [torch.device("cuda", 3), None, None]


def allocating(environ: dict[str, str], wsl: Path) -> str:
    nccl.WSL = wsl
    expand_segments(environ)
    return str(torch._C._accelerator_getAllocatorSettings())


def of_another_torch(wsl: Path) -> str:
    """Which has no option for pinned memory, and says so."""
    nccl.WSL, settings = wsl, list[str]()

    def tell(text: str) -> None:
        if "pinned" in text:
            raise RuntimeError("Unrecognized key 'pinned_max_round_threshold_mb'")
        settings.append(text)

    with patch.object(torch._C, "_accelerator_setAllocatorSettings", tell):
        expand_segments({})
    return ",".join(settings)


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_setAllocatorSettings"), reason="torch before 2.10 reads the variable alone"
)
def test_memory_of_a_gpu_grows_in_place_unless_the_environment_says_how(tmp_path: Path) -> None:
    nowhere = tmp_path / "dxg"
    assert ranks(1, allocating, {}, nowhere) == ["expandable_segments:True,pinned_max_round_threshold_mb:64"]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert "expandable" not in ranks(1, allocating, {name: "max_split_size_mb:64"}, nowhere)[0]
    assert ranks(1, of_another_torch, nowhere) == ["expandable_segments:True"]
    nowhere.touch()
    assert "expandable" not in ranks(1, allocating, {}, nowhere)[0], "not under Windows"


@pytest.mark.parametrize(("content", "cores"), [
    ("0-3,64-67\n", {0, 1, 2, 3, 64, 65, 66, 67}), ("7\n", {7}), ("\n", set()), (None, set()), ("all", set()),
])  # fmt: skip
def test_cores_beside_a_gpu(content: str | None, cores: set[int], tmp_path: Path) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    if content is not None:
        (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(content)
    assert cores_near("0000:1b:00.0", tmp_path) == cores


def running(cores: set[int], allowed: set[int]) -> tuple[set[int], int]:
    os.sched_setaffinity(0, allowed)
    os.cpu_count = lambda: 2  # type: ignore[assignment]
    torch.set_num_threads(2)
    run_on(cores)
    return os.sched_getaffinity(0), torch.get_num_threads()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_rank_runs_beside_its_gpu_unless_it_was_given_cores() -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    both = {first, second}
    for cores, allowed, expected in (
        ({first}, both, ({first}, 1)),
        ({first}, {second}, ({second}, 2)),
        (both, both, (both, 2)),
        (set(), both, (both, 2)),
    ):
        assert ranks(1, running, cores, allowed) == [expected]


def opened(bus: Path, core: int) -> set[int]:
    """The cores after `open` of a rank whose GPU is at 000a:1b:00."""
    os.cpu_count = lambda: len(os.sched_getaffinity(0))  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        pci_domain_id=10, pci_bus_id=0x1B, pci_device_id=0, uuid="a"
    )
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    nccl.cores_near = lambda address: cores_near(address, bus)
    Nccl(timeout=5, connect="use", segments="fixed", cores="near", kernels="fast").open()
    return os.sched_getaffinity(0)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_gpu_of_a_rank_is_found_on_its_bus(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    (tmp_path / "000a:1b:00.0").mkdir()
    (tmp_path / "000a:1b:00.0" / "local_cpulist").write_text(f"{core}\n")
    assert ranks(1, opened, tmp_path, core) == [{core}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_both_devices_travel() -> None:
    with Nccl(timeout=60, connect="start", segments="expandable", cores="near", kernels="fast").open():
        for device in ("cpu", "cuda"):
            value = torch.ones(3, device=device)
            dist.all_reduce(value)
            assert value.tolist() == [dist.get_world_size()] * 3
        assert torch.cuda.current_device() == 0
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("local_rank", "seen", "gpu"),
    [
        (0, 8, 0),
        (7, 8, 7),
        (0, 1, 0),
        (3, 1, 0),
        (1, 2, 1),
    ],  # the fourth: srun --gpus-per-task=1, --gpu-bind=single:1, a wrapper of mpirun
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees(local_rank: int, seen: int, gpu: int) -> None:
    assert gpu_of(local_rank, seen) == gpu


@pytest.mark.parametrize(("local_rank", "seen"), [(2, 2), (0, 0), (8, 4)])
def test_a_rank_without_a_gpu_is_told_so(local_rank: int, seen: int) -> None:
    with pytest.raises(PreflightError, match=f"LOCAL_RANK={local_rank}, and this rank sees {seen} GPU"):
        gpu_of(local_rank, seen)


@pytest.mark.parametrize(
    ("local_rank", "shown", "seen", "gpu"),
    [
        ("2", None, 4, "2"),
        ("2", "4,5,6,7", 4, "6"),
        ("3", "5", 1, "5"),
        ("3", None, 1, "0"),
        ("1", "3,2,-1,0", 2, "2"),
        ("0", "GPU-5f1c", 1, "GPU-5f1c"),
    ],
)  # the fourth: a control group or the runtime of a container hides the others
def test_a_gpu_that_is_broken_is_the_one_that_the_rank_has_taken(
    local_rank: str, shown: str | None, seen: int, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    def message() -> str:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if shown is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
        try:
            Nccl(timeout=5, connect="use", segments="fixed", cores="any", kernels="fast").open()
        except RuntimeError as error:
            return str(failure.facts_of(error, 0)["error"])
        return ""

    assert ranks(1, message)[0].startswith(f"GPU {gpu}: RuntimeError: CUDA error: uncorrectable ECC")


def test_two_ranks_on_one_gpu_are_told_before_they_connect() -> None:
    """NCCL would refuse, in the first collective; ranks of which each sees a GPU alone cannot know by themselves."""

    def work(gpus: list[str]) -> str:
        try:
            with process_group("gloo", timeout=5, gpu=gpus[int(os.environ["RANK"])]):
                return "connected"
        except (PreflightError, RuntimeError) as error:
            return str(error)

    assert ranks(2, work, ["GPU-a", "GPU-b"]) == ["connected"] * 2
    assert any(
        "have the same GPU (GPU-a). Start one rank for each GPU" in message
        for message in ranks(2, work, ["GPU-a", "GPU-a"])
    )


def test_ranks_that_each_see_one_gpu_have_as_many_as_their_launcher_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr("dtrain.cluster.FILES", tmp_path)
    place = {
        "RANK": "1",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    plan = resolve(composed("batch=16", "requires.gpus=4"), detect(place | {"CUDA_VISIBLE_DEVICES": "0"}))
    assert (plan.device, plan.nodes, plan.devices) == ("cuda", 2, 4)


def test_kernels_add_in_one_order_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of cuBLAS is there, which reads its variable once; what the user has set stays."""
    with pytest.raises(WordsError, match="backend\\.kernels"):
        plan("backend=nccl", "backend.kernels=slow", on=GPUS)
    assert plan("backend=nccl", on=GPUS).backend["kernels"] == "fast"
    asked = plan("backend=nccl", "backend.kernels=deterministic", on=GPUS).backend

    def opened() -> tuple[bool, bool, str]:
        def begin(device: object) -> None:
            raise ConnectionError

        monkeypatch.setattr(torch.cuda, "set_device", begin)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        torch.backends.cudnn.benchmark = True
        with pytest.raises(ConnectionError), build({**asked, "cores": "any", "segments": "fixed"}).open():
            pass
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            os.environ["CUBLAS_WORKSPACE_CONFIG"],
        )

    assert ranks(1, opened) == [(True, False, ":4096:8")]
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    ranks(1, lambda: add_in_one_order(environ))
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
