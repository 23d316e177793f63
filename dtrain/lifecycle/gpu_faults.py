"""Errors of GPUs: a bug of the program, too little memory, or a broken GPU."""

import re
from typing import NamedTuple


class Xid(NamedTuple):
    """An error that NVIDIA's driver reports: its meaning, and whose fault it is."""

    meaning: str
    whose: str

    @property
    def broken(self) -> bool:
        return self.whose == "GPU"


WHOSE = {
    "GPU": "the GPU's fault, not the program's",
    "memory": "the GPU's fault; it still works, but reset it (nvidia-smi -r) when it is free",
    "program": "the program's fault, not the GPU's",
    "earlier": "a consequence of an earlier error, or of the end of the program",
}
XIDS = {
    13: Xid("a kernel used an invalid address or instruction", "program"),
    31: Xid("a kernel accessed an invalid memory address", "program"),
    43: Xid("the GPU stopped this program after an error in it", "program"),
    45: Xid("the driver removed this program's work", "earlier"),
    48: Xid("its memory has an error that ECC cannot correct", "GPU"),
    61: Xid("its own controller stopped at a breakpoint or gave a warning", "GPU"),
    62: Xid("its own controller halted", "GPU"),
    63: Xid("the driver is retiring bad rows of its memory", "memory"),
    64: Xid("the driver could not retire bad rows of its memory", "GPU"),
    74: Xid("its links to other GPUs fail (NVLink)", "GPU"),
    79: Xid("the host no longer reaches it: it has fallen off the bus", "GPU"),
    92: Xid("ECC corrects errors of its memory more often than it should", "memory"),
    94: Xid("a memory error ended this program, but no other", "memory"),
    95: Xid("a memory error may affect any program on it", "GPU"),
    119: Xid("its system processor (GSP) did not answer the driver", "GPU"),
    120: Xid("its system processor (GSP) failed", "GPU"),
    140: Xid("its memory has an ECC error from which it did not recover", "GPU"),
}
"""Xid number -> its meaning, for the errors that occur in training.
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
"""
UNKNOWN = Xid("see https://docs.nvidia.com/deploy/xid-errors", "earlier")


class Fault(NamedTuple):
    """A pattern of error messages. `meaning` is added to the error; `broken`: the GPU itself is broken."""

    pattern: re.Pattern[str]
    meaning: str
    broken: bool = False


FULL = (
    r"(CUDA|HIP) out of memory|OutOfMemoryError|(CUDA error: |Cuda failure (\d+ )?')out of memory|CUDA ran out of "
    r"memory|CUBLAS_STATUS_ALLOC_FAILED"
)
"""Out of memory: in torch's allocator, in CUDA, in NCCL and in cuBLAS."""
INVALID = (
    "device-side assert triggered|illegal memory access|misaligned address|invalid program counter|illegal instruction"
)
XID = rf"Xid \([^)]*\): ({'|'.join(str(number) for number, xid in XIDS.items() if xid.broken)})\b"
BROKEN = {
    "(?i)uncorrectable ECC|double bit ECC": "its memory is broken (ECC)",
    "(?i)fallen off the bus|GPU is lost": "the host no longer reaches it",
    "(?i)over nvlink or a hardware error|uncorrectable nvlink": "its links are broken (NVLink)",
    XID: "its driver reports a broken GPU (Xid)",
    "system not yet initialized": "its host has not set up its links: nvidia-fabricmanager must run",
}
OTHERS = {
    FULL: "the GPU's memory is full: type a smaller microbatch=, or remat=full",
    "shared memory segment|/dev/shm/nccl": "/dev/shm has no room for NCCL: docker run --shm-size=1g, an emptyDir of "
    "Kubernetes there, or NCCL_SHM_DISABLE=1, which is slower",
    INVALID: "a kernel got invalid values, such as an index out of range, maybe from an earlier line: "
    "CUDA_LAUNCH_BLOCKING=1 shows which",
    "(?i)CUDA error: |unhandled cuda error": "CUDA failed on this rank itself",
}
FAULTS = (
    *(Fault(re.compile(pattern), meaning, broken=True) for pattern, meaning in BROKEN.items()),
    *(Fault(re.compile(pattern), meaning) for pattern, meaning in OTHERS.items()),
)
"""The first match counts. The messages are those of c10/cuda and c10d of torch 2.13.0 and 2.14.1, of cudaGetErrorString
of CUDA 13 and of NCCL 2.27.
"""


def fault_of(message: str) -> Fault | None:
    """The GPU fault that an error message describes, if any."""
    return next((fault for fault in FAULTS if fault.pattern.search(message)), None)


def of_xid(number: int, bus: str) -> str:
    """The message of an Xid of the GPU at `bus`."""
    known = XIDS.get(number, UNKNOWN)
    return f"Xid {number} of the GPU at {bus}: {known.meaning}" + (f"; {WHOSE[known.whose]}" if number in XIDS else "")
