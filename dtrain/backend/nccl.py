"""Collectives between GPUs; CPU tensors still use gloo, so control messages never wait for a device."""

import os
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtrain.backend import process_group
from dtrain.errors import PreflightError
from dtrain.lifecycle import failure, recorder, unwatched

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's variables for its allocator."""
UNROUNDED = "pinned_max_round_threshold_mb:64"
"""Smaller pieces are rounded up and reused."""
WSL = Path("/dev/dxg")
"""The device of WSL's driver, which does not support expandable segments."""


@dataclass(frozen=True)
class Nccl:
    """The arguments are explained in conf/backend/nccl.yaml. The rank's GPU is `gpu_of` it."""

    timeout: float
    connect: str
    segments: str
    cores: str
    kernels: str

    def open(self) -> AbstractContextManager[None]:
        device = torch.device("cuda", gpu_of(int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()))
        failure.computes_on(device.index)
        if self.segments == "expandable":
            expand_segments(os.environ)
        gpu: Any = torch.cuda.get_device_properties(device)
        if folder := unwatched.reports():
            failure.has_gpu(folder, int(os.environ.get("RANK", 0)), bus_of(gpu))
        if self.kernels == "deterministic":
            add_in_one_order(os.environ)
        if self.cores == "near":
            run_on(cores_near(bus_of(gpu)))
        recorder.record(os.environ)
        torch.cuda.set_device(device)
        at_start = device if self.connect == "start" else None
        return process_group("cpu:gloo,cuda:nccl", timeout=self.timeout, device=at_start, gpu=str(gpu.uuid))


def bus_of(gpu: Any) -> str:
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def gpu_of(local_rank: int, seen: int) -> int:
    """The number of this rank's GPU among the visible ones: 0 if it sees only one (srun --gpus-per-task=1, a wrapper
    that sets CUDA_VISIBLE_DEVICES). Raises PreflightError if there is none for it.
    """
    if seen != 1 and local_rank >= seen:
        raise PreflightError(
            f"LOCAL_RANK={local_rank}, and this rank sees {seen} GPU(s). Start one rank for each GPU of a host, or "
            "show each rank its own in CUDA_VISIBLE_DEVICES."
        )
    return 0 if seen == 1 else local_rank


def expand_segments(environ: Mapping[str, str]) -> None:
    """Make torch's allocator use expandable segments, unless the environment configures it; and pin host memory, as of
    snapshots, at its exact size, which torch would round up to a power of two.
    """
    # not the variables: they are read once, maybe by the process that forks the ranks
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure and not any(name in environ for name in ALLOCATOR) and not WSL.exists():
        try:
            configure(f"expandable_segments:True,{UNROUNDED}")
        except (RuntimeError, ValueError):  # a torch that has no such option
            configure("expandable_segments:True")


def add_in_one_order(environ: MutableMapping[str, str]) -> None:
    """Before cuBLAS is used: choose deterministic kernels; torch refuses operators that have none."""
    environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def cores_near(bus: str, root: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """The cores of the NUMA node that the PCI device `bus` is connected to; empty if the system does not report it."""
    try:
        ranges = [part.split("-") for part in (root / bus / "local_cpulist").read_text("utf-8").strip().split(",")]
        return {core for first, *last in ranges for core in range(int(first), int(*last or [first]) + 1)}
    except (OSError, ValueError):  # a virtual machine may have no such file
        return set()


def run_on(cores: set[int]) -> None:
    """Pin all threads of this process to those of its cores that are among these, and reduce their number to fit. A
    process that its launcher has pinned stays there.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if len(allowed) < (os.cpu_count() or 1) or not cores & allowed or allowed <= cores:
        return
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores & allowed)
    if torch.get_num_threads() > len(cores & allowed):
        torch.set_num_threads(len(cores & allowed))
