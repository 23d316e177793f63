"""Ranks for tests: forked from the test process, which already holds torch, meeting at a store on loopback.

results = ranks(2, work, argument)          # [work(argument) of rank 0, ... of rank 1]
"""

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d

from dtrain.launcher.process import fork, fork_store


class RankFailed(AssertionError):
    """The first traceback of a rank."""


def ranks(world: int, work: Callable[..., Any], *arguments: Any, seconds: float = 300) -> list[Any]:
    """Run `work(*arguments)` on `world` ranks. What it returns must pickle. Raises RankFailed with the first traceback."""
    store_pid, port = fork_store()
    pipes, pids = {}, []
    try:
        for rank in range(world):
            reading, writing = os.pipe()
            pids.append(fork(lambda rank=rank, writing=writing: _rank(rank, world, port, writing, work, arguments)))
            os.close(writing)
            pipes[reading] = rank
        return _collect(pipes, world, seconds)
    finally:
        for pid in (*pids, store_pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in pipes:
            os.close(pipe)


def _rank(rank: int, world: int, port: int, writing: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    distributed_c10d._tensor_to_object = _refuse  # type: ignore[attr-defined] # its collectives of objects
    torch.set_num_threads(1)  # renews the thread pool after the fork, as the launcher's ranks do
    try:
        answer = (True, work(*arguments))
    except BaseException:  # torch has exceptions that are no Exception
        answer = (False, traceback.format_exc())
    with os.fdopen(writing, "wb") as pipe:
        pickle.dump(answer, pipe)


def _refuse(*_: Any) -> Any:
    raise AssertionError("what came over a network was to be unpickled: whoever can reach a rank could run code there")


def _collect(pipes: dict[int, int], world: int, seconds: float) -> list[Any]:
    answers: dict[int, Any] = {}
    parts: dict[int, bytes] = dict.fromkeys(pipes, b"")
    deadline = time.monotonic() + seconds
    while len(answers) < world:
        ready, _, _ = select.select(
            [pipe for pipe, rank in pipes.items() if rank not in answers], [], [], max(0, deadline - time.monotonic())
        )
        if not ready:
            raise RankFailed(f"ranks {sorted(set(pipes.values()) - set(answers))} said nothing for {seconds} s")
        for pipe in ready:
            data = os.read(pipe, 1 << 20)
            parts[pipe] += data
            if not data:
                if not parts[pipe]:
                    raise RankFailed(f"rank {pipes[pipe]} ended without an answer")
                good, answer = pickle.loads(parts[pipe])
                if not good:
                    raise RankFailed(f"rank {pipes[pipe]}:\n{answer}")
                answers[pipes[pipe]] = answer
    return [answers[rank] for rank in range(world)]
