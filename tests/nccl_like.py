"""A process group that fails as NCCL's does, on the CPU: a collective waits for ever, nothing raises when the others are late, a watchdog of its own
ends the process by SIGABRT, destroying flushes what is queued, and errors have the messages of torch's ProcessGroupNCCL.

Backend `NcclLike`: `fault` names a function below; it happens on `rank` in its `at`-th collective of the world.
"""

import datetime
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo  # type: ignore[attr-defined] # exported without saying so

from dtrain.backend import process_group

FOREVER = datetime.timedelta(days=1)
SOURCE = "/pytorch/torch/csrc/distributed/c10d"
PLACE = "[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
NCCL = "NCCL version 2.27.5"
REMOTE = (
    f"NCCL error in: {SOURCE}/ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error, {NCCL}\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
    "socketProgress: Connection closed by remote peer localhost<40822>"
)
CUDA = (
    f"NCCL error in: {SOURCE}/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), {NCCL}\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'an illegal memory access was encountered'"
)
ABORTED = "NCCL communicator was aborted on rank {rank}."
KERNELS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)
LATE = (
    f"{PLACE} Watchdog caught collective operation timeout: WorkNCCL(SeqNum={{number}}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)={seconds}000) ran for {seconds}012 milliseconds before timing out."
)


_alive: list["Group"] = []
"""Whoever drops the last reference to a gloo group from Python joins its threads while it holds the interpreter."""


class Group(dist.ProcessGroup):
    """Gloo below, that never gives up; its name is NCCL's."""

    fault: Callable[["Group"], None] = staticmethod(lambda group: None)
    rank_of_fault, at = -1, 0

    def __init__(self, store: Any, rank: int, world: int) -> None:
        super().__init__(rank, world)
        _alive.append(self)
        self.inner, self.number, self.broken, self._store = ProcessGroupGloo(store, rank, world, FOREVER), 0, False, store

    def _enter(self) -> None:
        self.number += 1
        if self is dist.group.WORLD and (self.rank(), self.number) == (self.rank_of_fault, self.at):
            self.broken = True
            Group.fault(self)

    def _get_sequence_number_for_group(self) -> int:
        return self.number

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return "nccl_like"

    def shutdown(self) -> None:
        """Flushes what is queued, which waits for the others."""
        while self.broken:
            time.sleep(1)

    def abort(self) -> None:
        pass


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: Group, *arguments: Any, **more: Any) -> Any:
        self._enter()
        return getattr(self.inner, name)(*arguments, **more)

    return call


for _name in (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "reduce", "gather", "scatter",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "send", "recv", "barrier",
):  # fmt: skip
    setattr(Group, _name, _passed_on(_name))


dist.Backend.register_backend("nccl_like", lambda store, rank, world, timeout: Group(store, rank, world), devices=["cpu"])


@dataclass(frozen=True)
class NcclLike:
    """`timeout` in seconds, of every collective."""

    timeout: float
    fault: str = "none"
    rank: int = 1
    at: int = 9

    @contextmanager
    def open(self) -> Iterator[None]:
        Group.fault, Group.rank_of_fault, Group.at = getattr(sys.modules[__name__], self.fault), self.rank, self.at
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
