"""The thread that makes all calls of MPI. Collectives of one group run one after the other, those of other groups and
messages beside them; nothing blocks, so that each has its timeout.
"""

import atexit
import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import Work

T = TypeVar("T")
SPINS = 200
"""Looks in vain without a pause."""
PAUSE_SECONDS = (2e-5, 5e-4)
"""Shortest and longest time between two idle after that: they take a core from what computes."""
END_SECONDS = 10.0
"""Time for MPI to end, at the end of the process."""


class Operation(Work):
    """A call of MPI that completes later. `start` returns its requests, `finish` brings the result to its tensors."""

    def __init__(
        self, name: str, start: Callable[[], Sequence[Any]], finish: Callable[[], None], *, seconds: float, queue: Any,
        result: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.start, self.finish, self.seconds, self.queue = name, start, finish, seconds, queue
        self.requests: Sequence[Any] = ()
        self.deadline = 0.0
        self.source = -1
        self.error: Exception | None = None
        self.tensors, self._done = [*result], threading.Event()

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self._done.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises RuntimeError if it has failed or did not complete in time."""
        seconds = timeout.total_seconds() if timeout and timeout > timedelta(0) else None
        if not self._done.wait(seconds):
            raise RuntimeError(f"MPI: {self.name} timed out waiting {round((seconds or 0) * 1000)}ms")
        if self.error:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self.error is None

    def exception(self) -> Exception | None:
        return self.error

    def result(self) -> list[torch.Tensor]:
        return self.tensors

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> "torch.futures.Future[Any]":
        future: torch.futures.Future[Any] = torch.futures.Future()

        def settle() -> None:
            try:
                self.wait()
                future.set_result(self.tensors)
            except Exception as error:
                future.set_exception(error)

        if self.is_completed():
            settle()
        else:
            threading.Thread(target=settle, name="dtrain-mpi-future", daemon=True).start()
        return future


class Loop:
    """`rank` and `size` are those of MPI_COMM_WORLD."""

    _one: "Loop | None" = None

    @classmethod
    def of_process(cls) -> "Loop":
        """The only one of this process, in which MPI is initialized once. Raises ImportError and RuntimeError."""
        if cls._one is None:
            loop = cls()
            loop.initialize()
            cls._one = loop
        return cls._one

    def __init__(self) -> None:
        self.rank, self.size, self.library = 0, 1, ""
        self.mpi: Any = None
        """The module mpi4py.MPI, of which the import already takes a library."""
        self.broken = ""
        """Why MPI can do no more; empty if it can."""
        self._wake, self._new = threading.Condition(), deque[Operation | Callable[[], None]]()
        self._queues = dict[Any, deque[Operation]]()
        self._running, self._lost = list[Operation](), list[Operation]()
        self._thread = threading.Thread(target=self._run, name="dtrain-mpi", daemon=True)
        self._thread.start()

    def initialize(self) -> None:
        self.call(self._initialize, None)
        atexit.register(self._end)

    def submit(self, operation: Operation) -> Operation:
        self._put(operation)
        return operation

    def call(self, act: Callable[[], T], seconds: float | None) -> T:
        """The result of `act` in the thread of MPI. Raises its errors, and TimeoutError."""
        done, box = threading.Event(), list[Any]()

        def work() -> None:
            try:
                box.extend((act(), None))
            except BaseException as error:
                box.extend((None, error))
            done.set()

        self._put(work)
        if not done.wait(seconds):
            raise TimeoutError(f"MPI did not answer within {seconds:g} s")
        if box[1]:
            raise box[1]
        return box[0]  # type: ignore[no-any-return]

    def abort(self, reason: str) -> None:
        """Nothing of MPI completes any more, and the process ends without it: its launcher ends the other ranks."""
        self.broken = self.broken or reason

    def _initialize(self) -> None:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
        from mpi4py import MPI

        if not MPI.Is_initialized():
            # mpi4py's own call holds the interpreter's lock until all ranks are there, and some may wait for this one
            library, provided = ctypes.CDLL(MPI.__file__), ctypes.c_int()
            code = library.MPI_Init_thread(None, None, int(MPI.THREAD_SERIALIZED), ctypes.byref(provided))
            if code or provided.value < MPI.THREAD_SERIALIZED:
                raise RuntimeError(f"MPI_Init_thread: code {code}, level of threads {provided.value}")
            MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        self.mpi = MPI
        self.rank, self.size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        self.library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0")

    def _end(self) -> None:
        """Finalize MPI after a run that has ended well; otherwise that would wait for ranks that do not come."""
        if self.broken or self._running:
            return
        with contextlib.suppress(Exception):
            self.call(self._finalize, END_SECONDS)

    def _finalize(self) -> None:
        if not self.mpi.Is_finalized():
            self.mpi.Finalize()

    def _put(self, task: Operation | Callable[[], None]) -> None:
        with self._wake:
            self._new.append(task)
            self._wake.notify()

    def _run(self) -> None:
        idle = 0
        while True:
            with self._wake:
                while not self._new and not self._running:
                    self._wake.wait()
                new, self._new = self._new, deque()
            for task in new:
                if isinstance(task, Operation):
                    self._accept(task)
                else:
                    task()
            idle = 0 if self._look() or new else idle + 1
            if idle > SPINS:
                time.sleep(min(PAUSE_SECONDS[0] * (idle - SPINS), PAUSE_SECONDS[1]))
            else:
                time.sleep(0)

    def _accept(self, operation: Operation) -> None:
        """Start it, after those before it in its queue."""
        if operation.queue is None:
            self._start(operation)
            return
        queue = self._queues.setdefault(operation.queue, deque())
        queue.append(operation)
        if len(queue) == 1:
            self._start(operation)

    def _start(self, operation: Operation) -> None:
        operation.deadline = time.monotonic() + operation.seconds
        try:
            if self.broken:
                raise RuntimeError(self.broken)
            operation.requests = operation.start()
            self._running.append(operation)
        except Exception as error:
            self._ended(operation, error)

    def _look(self) -> bool:
        """Whether one has completed or failed."""
        some = False
        for operation in [*self._running]:
            try:
                completed = all(request.Test() for request in operation.requests)
                if completed:
                    operation.finish()
                elif self.broken or time.monotonic() > operation.deadline:
                    raise RuntimeError(self.broken or _late(operation))
                else:
                    continue
                error = None
            except Exception as failure:
                error = failure
                self._lost.append(operation)  # MPI may still write to its tensors
                self.abort(str(failure))
            some = True
            self._running.remove(operation)
            self._ended(operation, error)
        return some

    def _ended(self, operation: Operation, error: Exception | None) -> None:
        operation.end(error)
        if operation.queue is not None:
            queue = self._queues[operation.queue]
            queue.popleft()
            if queue:
                self._start(queue[0])


def _late(operation: Operation) -> str:
    return (
        f"MPI: {operation.name} timed out waiting {round(operation.seconds * 1000)}ms: this rank has entered it, and "
        "another has not"
    )
