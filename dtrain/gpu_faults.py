"""What an error of a GPU means: a mistake of the program, memory that is not there, or a GPU that is broken."""

import re
from typing import NamedTuple

XIDS = (48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140)
"""Numbers by which NVIDIA's driver reports that the GPU, its memory or its links fail, not the program. https://docs.nvidia.com/deploy/xid-errors"""


class Fault(NamedTuple):
    """`said` follows the error; `broken`: the GPU is, whatever runs on it."""

    pattern: re.Pattern[str]
    said: str
    broken: bool = False


FAULTS = (
    Fault(re.compile(r"uncorrectable ECC|double bit ECC", re.IGNORECASE), "its memory is broken (ECC)", broken=True),
    Fault(re.compile(r"fallen off the bus|GPU is lost", re.IGNORECASE), "the host no longer reaches it", broken=True),
    Fault(re.compile(r"over nvlink or a hardware error|uncorrectable nvlink", re.IGNORECASE), "its links are broken (NVLink)", broken=True),
    Fault(re.compile(rf"Xid \([^)]*\): ({'|'.join(map(str, XIDS))})\b"), "its driver reports a broken GPU (Xid)", broken=True),
    Fault(re.compile(r"(CUDA|HIP) out of memory|OutOfMemoryError"), "the GPU's memory is full: a smaller microbatch= or remat=full needs less"),
    Fault(
        re.compile(r"device-side assert triggered|illegal memory access|misaligned address"),
        "a kernel was given wrong values, as an index out of range, maybe at an earlier line: CUDA_LAUNCH_BLOCKING=1 shows which",
    ),
    Fault(re.compile(r"CUDA error: |unhandled cuda error", re.IGNORECASE), "CUDA failed on this rank itself"),
)
"""The first that is found counts."""


def fault_of(message: str) -> Fault | None:
    """The fault of the GPU that an error tells of, if it tells of one."""
    return next((fault for fault in FAULTS if fault.pattern.search(message)), None)
