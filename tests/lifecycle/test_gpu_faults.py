"""What CUDA, NCCL and torch say of a GPU, in the words of their sources, and what it is taken for."""

import pytest
import torch
import torch.distributed as dist
from nccl_like import ABORTED, CUDA, KERNELS, NCCL, REMOTE, SOURCE

from dtrain.lifecycle.gpu_faults import FAULTS, fault_of
from dtrain.lifecycle.root_cause import kind_of

SHARED = (
    f"NCCL error in: {SOURCE}/ProcessGroupNCCL.cpp:3690, unhandled system error (run with NCCL_DEBUG=INFO for details), {NCCL}\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\n"
    "Error while creating shared memory segment /dev/shm/nccl-VPyhzw (size 21823872), error: No space left on device (28)"
)
OUTSIDE = "CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes, cuDNN may need additional device memory"
TIMEOUT = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=3, NumelOut=3, Timeout(ms)=6000) "
    "ran for 6012 milliseconds before timing out."
)
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
TOLD: dict[str, tuple[Exception, str, str]] = {
    "ECC": (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered" + KERNELS), "gpu", "broken (ECC)"),
    "NVLink": (
        torch.AcceleratorError("CUDA error: uncorrectable NVLink error detected during the execution" + KERNELS),
        "gpu",
        "NVLink",
    ),
    "a peer": (
        torch.AcceleratorError(
            "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error" + KERNELS
        ),
        "gpu",
        "NVLink",
    ),
    "no fabric manager": (
        torch.AcceleratorError("CUDA error: system not yet initialized" + KERNELS),
        "gpu",
        "nvidia-fabricmanager",
    ),
    "an assertion": (
        torch.AcceleratorError("CUDA error: device-side assert triggered" + KERNELS),
        "error",
        "CUDA_LAUNCH_BLOCKING=1 shows which",
    ),
    "an address": (
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + KERNELS),
        "error",
        "invalid values",
    ),
    "a program counter": (
        torch.AcceleratorError("CUDA error: invalid program counter" + KERNELS),
        "error",
        "invalid values",
    ),
    "a launch": (
        torch.AcceleratorError("CUDA error: unspecified launch failure" + KERNELS),
        "error",
        "CUDA failed on this rank itself",
    ),
    "memory of torch": (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of"),
        "error",
        "is full",
    ),
    "memory of CUDA": (torch.AcceleratorError("CUDA error: out of memory" + KERNELS), "error", "is full"),
    "memory beside the allocator": (RuntimeError(OUTSIDE), "error", "is full"),
    "memory of cuBLAS": (RuntimeError(CUBLAS), "error", "is full"),
    "memory of NCCL": (
        dist.DistBackendError(CUDA.replace("700 'an illegal memory access was encountered'", "2 'out of memory'")),
        "error",
        "is full",
    ),
    "shared memory of NCCL": (dist.DistBackendError(SHARED), "error", "/dev/shm has no room for NCCL"),
    "CUDA in NCCL": (dist.DistBackendError(CUDA), "error", "invalid values"),
    "another rank": (dist.DistBackendError(REMOTE), "lost", ""),
    "an abort": (dist.DistBackendError(ABORTED.format(rank=0)), "lost", ""),
    "a late rank": (dist.DistBackendError(TIMEOUT), "timeout", ""),
    "a late rank of nccl2": (dist.DistBackendError("timeout - collective operation timed out"), "timeout", ""),
    "a late rank, seen by its watchdog": (
        dist.DistBackendError("timeout - timeout watchdog detected operation timeout"),
        "timeout",
        "",
    ),
    "an abort of nccl2": (dist.DistBackendError("NCCL communicator was aborted after a previous error"), "lost", ""),
    "a late connection": (dist.DistBackendError(f"NCCL timeout in: {SOURCE}/NCCLUtils.cpp:52"), "timeout", ""),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_is_said_is_taken_for_what_it_is(case: str) -> None:
    error, kind, meaning = TOLD[case]
    fault = fault_of(f"{type(error).__name__}: {error}")
    assert kind_of(error, str(error)) == kind
    assert (meaning in fault.meaning) if fault else not meaning


def test_every_fault_has_its_text() -> None:
    errors = [f"{type(error).__name__}: {error}" for error, *_ in TOLD.values()]
    rare = (
        "the host no longer reaches it",
        "its driver reports a broken GPU (Xid)",
    )  # of nvidia-smi and of the kernel's log
    assert [
        fault.meaning
        for fault in FAULTS
        if fault.meaning not in rare and not any(fault_of(text) is fault for text in errors)
    ] == []
