"""Processes that load samples: each is sent indices through a pipe of its own, and answers with arrays.

Not a pool of Python's: its queues need semaphores with names, which a killed rank leaves behind in the system.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined] # the stubs lack it
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data import Indices
from dtrain.data.collate import tree
from dtrain.errors import text_of
from dtrain.lifecycle import loaders, signals

DEATH_SECONDS = 1.0
"""How long to wait for the exit code of a process that does not answer."""
Read = Callable[[Indices, Indices], tuple[Any, Any]]


class Workers:
    """`count` processes that call `read(index, epoch)`, which gives trees of tensors. They end with this object."""

    def __init__(self, read: Read, count: int) -> None:
        # fresh interpreters: this process has threads, whose locks a fork would copy
        context, table = multiprocessing.get_context("spawn"), loaders.table(count)
        resource_tracker.ensure_running()  # the first process would start it, which unblocks signals
        self._turn = threading.Lock()
        self._pipes = list[connection.Connection]()
        self._processes = list[Any]()
        self._dead = ""
        for slot in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(read, table, slot, there))
            with signals.blocked():  # until it ignores them
                process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self.close = Finalize(self, _kill, (self._processes,), exitpriority=10)

    def read(self, index: Indices, epoch: Indices) -> list[Any]:
        """The samples in parts, in order, as trees of numpy arrays: the calling thread need not use torch. Raises
        RuntimeError, with the sample and the signal, if a process died; else the first error of `read`.
        """
        parts = zip(*(np.array_split(each, len(self._pipes)) for each in (index, epoch)), strict=True)
        with self._turn:
            if self._dead:  # the others may hold answers that nobody has read
                raise RuntimeError(self._dead)
            asked = [(pipe, part) for pipe, part in zip(self._pipes, parts, strict=True) if len(part[0])]
            try:
                for pipe, part in asked:
                    pipe.send(part)
                answers = [pipe.recv() for pipe, _ in asked]
            except (EOFError, OSError) as error:
                self._dead = self._deaths()
                raise RuntimeError(self._dead) from error
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def _deaths(self) -> str:
        ready = connection.wait([process.sentinel for process in self._processes], DEATH_SECONDS)
        ended = [process for process in self._processes if process.sentinel in ready]
        for process in ended:  # its exit code comes a moment later
            process.join()
        deaths = [f"a loading process {_ending(process.exitcode)}{_reading(process.pid)}" for process in ended]
        return "; ".join(deaths) or "a loading process died"


def _kill(processes: Iterable[Any]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _reading(pid: int) -> str:
    sample = loaders.reading().get(pid, -1)
    return f" while it read sample {sample} of data.dataset" if sample >= 0 else ""


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended by itself with exit code {code}"


# in a loading process


def _work(read: Read, table: Any, slot: int, pipe: connection.Connection) -> None:
    """Answer until the rank has ended. Stop signals are ignored, because the rank needs samples until it stops."""
    for number in signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    torch.set_num_threads(1)
    loaders.answer(table, slot)
    with suppress(EOFError, OSError):
        while True:
            request = pipe.recv()
            try:
                answer: Any = tuple(tree(Tensor.numpy, part) for part in read(*request))
            except BaseException as error:
                answer = ExceptionWithTraceback(_sendable(error), error.__traceback__)
            loaders.note(-1)
            pipe.send(answer)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _sendable(error: BaseException) -> BaseException:
    """The error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {text_of(error)}").with_traceback(error.__traceback__)
    return error
