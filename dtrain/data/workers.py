"""Processes that load samples: each is sent indices through a pipe of its own, and answers with arrays.

Not a pool of Python's: its queues need semaphores with names, which a killed rank leaves behind in the system.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined] # the stubs lack it
from multiprocessing.util import Finalize
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from dtrain.data import Indices, shared
from dtrain.data.collate import tree
from dtrain.errors import text_of
from dtrain.lifecycle import bus_error, loaders, signals

T = TypeVar("T")
DEATH_SECONDS = 1.0
"""How long to wait for the exit code of a process that does not answer."""
Read = Callable[[Indices, Indices], tuple[Any, ...]]


class LoaderError(RuntimeError):
    """A loading process died."""


class Answer(Generic[T]):
    """Samples that were asked for: called once or more often, it waits for them. `asked`: the processes that have a
    part of them.
    """

    def __init__(self, workers: "Workers", asked: Sequence[int], join: Callable[[list[Any]], T]) -> None:
        self.asked, self.join = asked, join
        self.error: BaseException | None = None
        self.value: T | None = None
        self.is_here = False
        self._workers = workers

    def __call__(self) -> T:
        """The joined parts. Raises LoaderError, with the sample and the signal, if a process died; else the first
        error of `read`.
        """
        self._workers.receive(self)
        if self.error:
            raise self.error
        return self.value  # type: ignore[return-value]


class Workers:
    """`count` processes that call `read(index, epoch)`, which gives trees of tensors. They end with this object."""

    def __init__(self, read: Read, count: int) -> None:
        # fresh interpreters: this process has threads, whose locks a fork would copy
        context, table = multiprocessing.get_context("spawn"), loaders.table(count)
        resource_tracker.ensure_running()  # the first process would start it, which unblocks signals
        self._asking, self._turn = threading.Lock(), threading.Lock()
        self._waiting = deque[Answer[Any]]()
        self._pipes = list[connection.Connection]()
        self._processes = list[Any]()
        self._memory = [shared.Received() for _ in range(count)]
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

    def ask(self, index: Indices, epoch: Indices, join: Callable[[list[Any]], T]) -> Answer[T]:
        """Have samples read, while those that were asked for before may still be: `join` makes one value of their
        parts, in order, trees of numpy arrays that may be read within it alone. It may run in any thread.
        """
        parts = zip(*(np.array_split(each, len(self._pipes)) for each in (index, epoch)), strict=True)
        with self._asking:
            while len(self._waiting) >= shared.BUFFERS:  # whose buffers are in use
                self.receive(self._waiting[0])
            asked = {number: part for number, part in enumerate(parts) if len(part[0])}
            answer = Answer(self, [*asked], join)
            with suppress(OSError):  # the process has died: receiving tells
                for number, part in asked.items():
                    self._pipes[number].send(part)
            self._waiting.append(answer)
        return answer

    def receive(self, answer: Answer[Any]) -> None:
        """Wait for an answer, and for all that were asked for before it."""
        with self._turn:
            while not answer.is_here:
                self._receive(self._waiting[0])
                self._waiting.popleft()

    def _receive(self, answer: Answer[Any]) -> None:
        answer.is_here = True
        if not self._dead:  # else the others may hold answers that nobody has read
            try:
                parts = [self._memory[number].receive(self._pipes[number]) for number in answer.asked]
            except (EOFError, OSError):
                self._dead = self._deaths()
        if self._dead:
            answer.error = LoaderError(self._dead)
            return
        answer.error = next((part for part in parts if isinstance(part, BaseException)), None)
        if answer.error is None:
            try:
                answer.value = answer.join(parts)
            except Exception as error:
                answer.error = error

    def _deaths(self) -> str:
        ready = connection.wait([process.sentinel for process in self._processes], DEATH_SECONDS)
        ended = [process for process in self._processes if process.sentinel in ready]
        for process in ended:  # its exit code comes a moment later
            process.join()
        if any(process.exitcode == loaders.UNGUARDED_CODE for process in ended):
            return loaders.UNGUARDED
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
    if code >= 0:
        return f"ended by itself with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}" + f" ({bus_error.UNKNOWN})" * (code == -signal.SIGBUS)


# in a loading process


def _work(read: Read, table: Any, slot: int, pipe: connection.Connection) -> None:
    """Answer until the rank has ended. Stop signals are ignored, because the rank needs samples until it stops."""
    for number in signals.STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    torch.set_num_threads(1)
    loaders.answer(table, slot)
    memory = shared.memory()
    with suppress(EOFError, OSError):
        while True:
            request = pipe.recv()
            memory.turn()
            try:
                answer: Any = tuple(tree(Tensor.numpy, part) for part in read(*request))
            except BaseException as error:
                answer = ExceptionWithTraceback(_sendable(error), error.__traceback__)
            loaders.note(-1)
            memory.send(pipe, answer)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _sendable(error: BaseException) -> BaseException:
    """The error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {text_of(error)}").with_traceback(error.__traceback__)
        plain.__notes__ = [*getattr(error, "__notes__", ())]
        return plain
    return error
