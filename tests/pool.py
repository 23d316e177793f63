"""Ranks for tests: forked from the test process, which already holds torch, meeting at a store on loopback.

results = ranks(2, work, argument)          # [work(argument) of rank 0, ... of rank 1]
results = resident(2, work, argument)       # the same, on ranks that stay for the next call
"""

import gc
import importlib
import os
import pickle
import pkgutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

import dtrain
from dtrain.errors import PreflightError
from dtrain.launcher import pages
from dtrain.launcher.process import fork, fork_store, kill

_stores: dict[int, int] = {}
"""pid of a test process -> the port of its store, which ends with it."""
_residents: dict[tuple[int, int], "_Ranks"] = {}
"""(pid of a test process, world) -> its ranks that stay, which end with it."""
_groups = count()


def prepare() -> None:
    """Import what ranks would; and freeze it, since a collector that looks at it would copy its pages, a second or more in the midst of a rank's work."""
    own = [module.name for module in pkgutil.walk_packages(dtrain.__path__, "dtrain.")]
    for name in ("encodings.idna", "numpy.ma", "torch._dynamo", *own):
        with suppress(ImportError, PreflightError):  # an extra that is not installed
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    pages.collapse()


class RankFailed(AssertionError):
    """The first traceback of a rank."""


def ranks(world: int, work: Callable[..., Any], *arguments: Any, seconds: float = 300) -> list[Any]:
    """Run `work(*arguments)` on `world` new ranks. What it returns must pickle. Raises RankFailed with the first traceback."""
    forked = _Ranks(world, lambda _: [partial(work, *arguments)])
    try:
        return forked.answers(seconds)
    finally:
        forked.end()


def resident(world: int, work: Callable[..., Any], *arguments: Any, seconds: float = 300) -> list[Any]:
    """`ranks`, on ranks that stay for the tests of this file: they have imported what a rank imports, and filled torch's caches. For work that
    pickles, needs nothing that a test changed in this process but its environment and folder, and leaves nothing changed. Ranks of which one fails
    are replaced.
    """
    key = os.getpid(), world
    if key not in _residents:
        _residents[key] = _Ranks(world, _requests)
    try:
        return _residents[key].ask(pickle.dumps((dict(os.environ), Path.cwd(), work, arguments)), seconds)
    except BaseException:
        _residents.pop(key).end()
        raise


def end_residents() -> None:
    """End the ranks that stay for this process's tests."""
    for key in [key for key in _residents if key[0] == os.getpid()]:
        _residents.pop(key).end()


class _Ranks:
    """`world` forked ranks that do one `work` after the other, of those that are made of the rank's end of a pipe."""

    def __init__(self, world: int, works: Callable[[Connection], Iterable[Callable[[], Any]]]) -> None:
        port, group = _store(), next(_groups)
        self.pids: list[int] = []
        self.pipes: list[Connection] = []
        for rank in range(world):
            here, there = Pipe()
            self.pipes.append(here)
            self.pids.append(fork(partial(_rank, rank, world, port, group, there, works)))
            there.close()

    def ask(self, request: bytes, seconds: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send_bytes(request)
        return self.answers(seconds)

    def answers(self, seconds: float) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while missing := {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in answers}:
            ready = wait(list(missing), max(0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(missing.values())} said nothing for {seconds} s")
            for pipe, rank in missing.items():
                if pipe in ready:
                    answers[rank] = self._answer(pipe, rank)
        return [answers[rank] for rank in range(len(self.pipes))]

    def _answer(self, pipe: Connection, rank: int) -> Any:
        try:
            good, answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise RankFailed(f"rank {rank} ended without an answer") from error
        if not good:
            raise RankFailed(f"rank {rank}:\n{answer}")
        return answer

    def end(self) -> None:
        kill(*self.pids)
        for pipe in self.pipes:
            pipe.close()


def _store() -> int:
    if os.getpid() not in _stores:
        _, _stores[os.getpid()] = fork_store()
    return _stores[os.getpid()]


def _rank(
    rank: int,
    world: int,
    port: int,
    group: int,
    pipe: Connection,
    works: Callable[[Connection], Iterable[Callable[[], Any]]],
) -> None:
    place = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place |= {"DTRAIN_STORE": f"{group}-"}
    distributed_c10d._tensor_to_object = _refuse  # type: ignore[attr-defined] # its collectives of objects
    torch.set_num_threads(1)  # renews the thread pool after the fork, as the launcher's ranks do
    for work in works(pipe):
        os.environ.update(place)
        try:
            answer = (True, work())
        except BaseException:  # torch has exceptions that are no Exception
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


def _requests(pipe: Connection) -> Iterator[Callable[[], Any]]:
    gc.freeze = gc.unfreeze = lambda: None  # `train` unfreezes all in the end, and a collection would copy all pages
    while True:
        environment, folder, work, arguments = pickle.loads(pipe.recv_bytes())
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        torch.manual_seed(0)
        yield partial(work, *arguments)
        del work, arguments
        gc.collect()  # else a process group of this work lives, and its threads


def _refuse(*_: Any) -> Any:
    raise AssertionError("what came over a network was to be unpickled: whoever can reach a rank could run code there")
