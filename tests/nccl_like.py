"""A process group that fails as NCCL's does, on the CPU: a collective waits for ever, nothing raises when the others are late, a watchdog of its own
ends the process by SIGABRT, destroying flushes what is queued, errors have the messages of torch's ProcessGroupNCCL, and the flight recorder has its dump.

Backend `NcclLike`: `fault` names a function below; it happens on `rank` in its `at`-th collective of the world, of those `inside` a function.
"""

import ctypes
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo  # type: ignore[attr-defined] # exported without saying so

from dtrain.backend import process_group
from dtrain.lifecycle import failure, kernel_log

FOREVER = datetime.timedelta(days=1)
SOURCE = "/__w/pytorch/pytorch/torch/csrc/distributed/c10d"
NCCL = "NCCL version 2.27.5"
"""Texts as in torch 2.13.0 and 2.14.1 (NCCLUtils.hpp and .cpp, CUDAException.cpp and CUDAMiscFunctions.cpp) and in this NCCL."""
REMOTE = (
    f"NCCL error in: {SOURCE}/ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, {NCCL}\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
    "socketProgress: Connection closed by remote peer localhost<40822>"
)
CUDA = (
    f"NCCL error in: {SOURCE}/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), {NCCL}\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 700 'an illegal memory access was encountered'"
)
ABORTED = "NCCL communicator was aborted on rank {rank}. "
KERNELS = (
    "\nSearch for `cudaError' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information."
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nDevice-side assertion tracking was not enabled by user."
)

_alive: list["Group"] = []
"""Whoever drops the last reference to a gloo group from Python joins its threads while it holds the interpreter."""


class Patient:
    """Whatever timeout it is given, it is aborted later, if at all."""

    def name(self) -> str:
        return "nccl"

    def _set_default_timeout(self, timeout: datetime.timedelta) -> None:
        pass


class Group(dist.ProcessGroup):
    """Gloo below, that never gives up; its name is NCCL's."""

    fault: Callable[["Group"], Any] = staticmethod(lambda group: None)
    rank_of_fault, at, inside = -1, 0, ""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        super().__init__(rank, world)
        _alive.append(self)
        self.inner, self._store = ProcessGroupGloo(store, rank, world, FOREVER), store
        self.number, self.counted, self.broken = 0, 0, False
        self.recorded: list[tuple[str, Any]] = []
        """What was called, and its work."""

    def _enter(self) -> Any:
        """The work of another call, where the fault is one."""
        instead = self._count() if self is dist.group.WORLD and _is_in(self.inside) else None
        self.number += 1
        return instead

    def _count(self) -> Any:
        self.counted += 1
        if self.counted == self.at and self.rank() == self.rank_of_fault:
            self.broken = True
            if reports := os.environ.get("DTRAIN_REPORTS"):
                (Path(reports) / "fault").write_text(str(time.time()))
            return Group.fault(self)
        if self.counted == self.at and Group.fault.__name__ in OTHERS:
            OTHERS[Group.fault.__name__](self)
        return None

    def dumped(self) -> Iterator[dict[str, Any]]:
        """As FlightRecorder's dump_json of torch 2.13 and 2.14, in what is read of it."""
        for number, (name, work) in enumerate(self.recorded, 1):
            state = "completed" if work.is_completed() else "scheduled"
            yield {
                "process_group": [str(dist.distributed_c10d._world.pg_names.get(self)), "default_pg"], "profiling_name": f"nccl:{name}",
                "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "state": state, "retired": state == "completed", "input_sizes": [],
            }  # fmt: skip

    def end_natively(self) -> None:
        """A thread that Python does not know ends the process, a little later: as what NCCL's watchdog throws does."""
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        threading.Timer(1.0, lambda: libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)).start()

    def _get_sequence_number_for_group(self) -> int:
        return self.number

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_backend(self, device: torch.device) -> Any:
        return Patient()

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return "nccl_like"

    def shutdown(self) -> None:
        """Flushes what is queued, which waits for the others."""
        if self.broken:
            time.sleep(600)

    def abort(self) -> None:
        pass


def _is_in(function: str) -> bool:
    """Whether the collective is called in it; where none is named, all are."""
    frame = sys._getframe(3)
    while function and frame.f_code.co_name != function and frame.f_back:
        frame = frame.f_back
    return function in ("", frame.f_code.co_name)


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: Group, *arguments: Any, **more: Any) -> Any:
        instead = self._enter()
        work = instead or getattr(self.inner, name)(*arguments, **more)
        self.recorded.append(("broadcast" if instead else name, work))
        return work

    return call


for _name in (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "reduce", "gather", "scatter",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "send", "recv", "barrier",
):  # fmt: skip
    setattr(Group, _name, _passed_on(_name))


dist.Backend.register_backend(
    "nccl_like", lambda store, rank, world, timeout: Group(store, rank, world), devices=["cpu"]
)


@dataclass(frozen=True)
class NcclLike:
    """`timeout` in seconds, of every collective."""

    timeout: float
    fault: str = "none"
    rank: int = 1
    at: int = 9
    inside: str = ""

    @contextmanager
    def open(self) -> Iterator[None]:
        Group.fault, Group.rank_of_fault = getattr(sys.modules[__name__], self.fault), self.rank
        Group.at, Group.inside = self.at, self.inside
        if reports := os.environ.get("DTRAIN_REPORTS"):
            failure.has_gpu(Path(reports), int(os.environ["RANK"]), f"0000:{int(os.environ['RANK']):02x}:00.0")
        recorder = sys.modules["torch._C._distributed_c10d"]
        recorder._dump_nccl_trace_json = lambda: json.dumps(
            {"entries": [entry for group in _alive for entry in group.dumped()]}
        )  # type: ignore[attr-defined]
        with process_group("nccl_like", timeout=self.timeout):
            yield


# faults


def none(group: Group) -> None:
    pass


def raises(group: Group) -> NoReturn:
    raise ValueError("planned")


def raises_and_hangs(group: Group) -> NoReturn:
    """So does the abort."""
    group.abort = lambda: time.sleep(600)  # type: ignore[method-assign]
    raise ValueError("planned")


def late(group: Group) -> None:
    """It never comes; for the others see `Group._enter`."""
    time.sleep(600)


def calls_another(group: Group) -> Any:
    """The first rank sends nothing of the kind."""
    return group.inner.broadcast([torch.empty(1)], dist.BroadcastOptions())


def aborts_who_waits(group: Group) -> None:
    """NCCL's watchdog of the others ends them, and nobody else has said a word."""
    time.sleep(600)


def aborts_all_who_wait(group: Group) -> None:
    time.sleep(600)


def unhandled_cuda_error(group: Group) -> NoReturn:
    raise dist.DistBackendError(CUDA)


def broken_memory(group: Group) -> NoReturn:
    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered" + KERNELS)


def off_the_bus(group: Group) -> NoReturn:
    raise RuntimeError(
        "CUDA error: unknown error\nNVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus." + KERNELS
    )


def driver_reports(group: Group) -> NoReturn:
    """The error itself says nothing of what its driver wrote to the kernel's log."""
    with kernel_log.KMSG.open("a") as file:
        file.write(
            f"4,1,2,-;NVRM: Xid (PCI:0000:{group.rank():02x}:00): 119, pid={os.getpid()}, Timeout waiting for RPC from GSP!\n"
        )
    raise dist.DistBackendError(CUDA)


def out_of_memory(group: Group) -> NoReturn:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.11 GiB of which 1.20 GiB is free."
    )


def device_assert(group: Group) -> NoReturn:
    raise torch.AcceleratorError("CUDA error: device-side assert triggered" + KERNELS)


def killed(group: Group) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def aborted_by_itself(group: Group) -> NoReturn:
    os.abort()


def others_lose_it(group: Group) -> NoReturn:
    """They say so before it does."""
    time.sleep(0.5)
    raise ValueError("planned")


OTHERS: dict[str, Callable[[Group], None]] = {
    "aborts_who_waits": lambda group: group.end_natively() if group.rank() == 0 else None,
    "aborts_all_who_wait": lambda group: group.end_natively(),
    "unhandled_cuda_error": lambda group: lose(REMOTE),
    "broken_memory": lambda group: lose(CUDA),
    "driver_reports": lambda group: lose(CUDA),
    "killed": lambda group: lose(REMOTE),
    "others_lose_it": lambda group: lose(ABORTED.format(rank=group.rank())),
}
"""What NCCL does meanwhile on the other ranks."""


def lose(message: str) -> NoReturn:
    raise dist.DistBackendError(message)
