"""Backends: one opens the process group of a rank and closes it again."""

import datetime
import faulthandler
import os
import pkgutil
import queue
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from dtrain.backend.rendezvous import StoreWatch, await_ranks, connect, within
from dtrain.cluster import network
from dtrain.config.environment import WAIT
from dtrain.errors import PreflightError

_kept: dict[int, object] = {}
"""pid -> the last group of that process. Whoever drops the last reference to a gloo group joins its threads; when that
is DDP's reducer it holds the interpreter's lock, for which those threads wait, and the finished process hangs. Python's
own reference is dropped last. A forked child keeps its parent's group untouched: the threads to be joined do not exist
there.
"""
_met = Counter[str]()
"""The number of rendezvous at the store of an address: it keeps the keys of earlier process groups, as of dead
attempts.
"""
LAYOUT_CACHES = (
    "torch.distributed.tensor._api:DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear",
    "torch._C:_clear_DTensor_sharding_propagator_cache",
    "torch.distributed.tensor._redistribute:clear_redistribute_planner_cache",
    "torch.distributed.tensor._redistribute:_gen_transform_infos.cache_clear",
    "torch.distributed.tensor._collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
)
"""Functions that clear DTensor's caches. A version of torch without one of them has nothing there to clear."""
ABORT_SECONDS = 1.0
"""NCCL's abort may hang as its collectives do."""
EXIT_SECONDS = 10.0
"""Time for the process to report its error after that."""


class Backend(Protocol):
    def open(self) -> AbstractContextManager[None]:
        """Join the group of RANK, WORLD_SIZE and MASTER_ADDR, or one of a single rank if they are not set."""
        ...


@contextmanager
def process_group(backend: str, *, timeout: float, device: torch.device | None = None, gpu: str = "") -> Iterator[None]:
    """The default group of this process, as a context. `timeout`: seconds. `device`: the GPU that is connected to the
    others at once; groups of axes are then split from the group of all, not connected anew. `gpu`: a name that no other
    GPU has. Raises PreflightError if two ranks have the same GPU.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store: Store
    with ExitStack() as stack:
        stack.callback(setattr, sys, "excepthook", sys.excepthook)  # torch sets one of its own, at each group
        watched, shared = "MASTER_ADDR" in os.environ, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if os.environ.get("LOCAL_WORLD_SIZE", "1" if world == 1 else "") == str(world):
            stack.enter_context(network.on_loopback())  # no rank is elsewhere
        if watched:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            wait = float(os.environ.get(WAIT, timeout))
            is_master = not shared and rank == 0
            store = connect(host, port, world, is_master=is_master, shared=shared, seconds=timeout, wait=wait)
            watch = stack.enter_context(StoreWatch(store, f"{host}:{port}", seconds=timeout, rank=rank))
            # what is left there of another attempt, or group, is waited for in vain:
            # https://github.com/pytorch/pytorch/issues/147064
            attempt, time = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0), _met[f"{host}:{port}"]
            store = PrefixStore(f"{os.environ.get('DTRAIN_STORE', '')}attempt-{attempt}-{time}", store)
            _met[f"{host}:{port}"] += 1
            if WAIT in os.environ:
                await_ranks(store, rank, world, wait=wait)
        else:
            store = HashStore()
        if gpu and (other := store.compare_set(f"gpu-{gpu}", "", str(rank)).decode()) != str(rank):
            raise PreflightError(
                f"ranks {other} and {rank} have the same GPU ({gpu}). Start one rank for each GPU, or show each rank "
                "its own in CUDA_VISIBLE_DEVICES."
            )
        _kept.pop(os.getpid(), None)
        join = partial(dist.init_process_group, backend, store=store, rank=rank, world_size=world)
        join = partial(join, timeout=datetime.timedelta(seconds=timeout), device_id=device)
        within(None, lambda: _meet(join, store, world))
        _kept[os.getpid()] = dist.group.WORLD
        try:
            yield
            if watched and not shared:  # the store ends with rank 0, which the others may not take for a loss
                watch.stop()
                dist.barrier()
        except BaseException:
            _abort()
            raise
        dist.destroy_process_group()
        _forget_layouts()


def _meet(join: Callable[[], None], store: Store, world: int) -> None:
    """Join the group, and wait until all ranks have: of one that has left, who still connects would say that it
    crashed.
    """
    join()
    if store.add("joined", 1) == world:
        store.set("all joined", "")
    store.wait(["all joined"])


def _forget_layouts() -> None:
    """Clear DTensor's caches of layouts. Their entries keep meshes and so groups with their threads. A mesh of the same
    shape finds them again, and then uses groups by name, though the next process group gives the names anew.
    """
    if "torch.distributed.tensor" in sys.modules:
        for clear in LAYOUT_CACHES:
            with suppress(ImportError, AttributeError):
                pkgutil.resolve_name(clear)()


def _abort() -> None:
    """Abort all groups after an error, without waiting: destroying an NCCL group flushes its queue, for which the
    others never come. If the abort hangs too, the process is ended, since its exit would wait for the same.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(ABORT_SECONDS + EXIT_SECONDS, exit=True, file=nowhere)
    with suppress(Exception):  # the error that is on its way counts
        try:
            within(ABORT_SECONDS, distributed_c10d._abort_process_group)
        except queue.Empty:
            return
    faulthandler.cancel_dump_traceback_later()
    os.close(nowhere)


__all__ = ["Backend", "process_group"]
