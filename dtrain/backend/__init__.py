"""How ranks talk. A Backend opens the process group of one rank and closes it again."""

import datetime
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # exported without saying so

_kept: dict[int, object] = {}
"""pid -> the last group of that process. Whoever drops the last reference to a gloo group joins its threads; when that is DDP's reducer it
holds the interpreter's lock, for which those threads wait, and the finished process hangs. Python's own reference is dropped last. A forked child keeps
its parent's group untouched: the threads to be joined do not exist there."""


class Backend(Protocol):
    def open(self) -> AbstractContextManager[None]:
        """Join the group described by RANK, WORLD_SIZE and MASTER_ADDR, or one of a single rank when they are not set."""
        ...


@contextmanager
def process_group(backend: str, *, timeout: float) -> Iterator[None]:
    """The default group of this process, for as long as the context lasts. `timeout` in seconds."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    wait = datetime.timedelta(seconds=timeout)
    store: Store
    if "MASTER_ADDR" not in os.environ:
        store = HashStore()
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _connect(host, port, world, is_master=not shared and rank == 0, seconds=timeout)
        # a shared store keeps the keys of a dead attempt, and the restart would hang on them
        # https://github.com/pytorch/pytorch/issues/147064
        store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    _kept.pop(os.getpid(), None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    _kept[os.getpid()] = dist.group.WORLD
    try:
        yield
    finally:
        dist.destroy_process_group()


def _connect(host: str, port: int, world: int, *, is_master: bool, seconds: float) -> TCPStore:
    """The store of the run. A connection that is not there within ten seconds is tried again: one that got lost is waited for in vain."""
    deadline = time.monotonic() + seconds
    while True:
        wait = datetime.timedelta(seconds=seconds if is_master else min(10.0, seconds))
        try:
            store = TCPStore(host, port, world, is_master=is_master, timeout=wait, wait_for_workers=False)
        except RuntimeError:  # torch's DistNetworkError and DistStoreError
            if is_master or time.monotonic() > deadline:
                raise
            continue
        store.set_timeout(datetime.timedelta(seconds=seconds))
        return store


__all__ = ["Backend", "process_group"]
