"""Memory that a loading process shares with its rank: arrays of samples cross as places in it, not as bytes in a pipe.
It has no name, so nothing is left behind in the system, and no limit of /dev/shm.
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import connection, reduction
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUFFERS = 3
"""Of a process, used in turn: what is being read, and what the rank has not copied yet."""
SMALL = 1 << 16
"""Bytes of arrays that are sent through the pipe."""
ALIGNED = 64


@dataclass(frozen=True)
class Place:
    """An array in the buffer of an answer."""

    begin: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Grown:
    """The buffer `number` is another from now on; its file follows."""

    number: int


class Memory:
    """In a loading process: its buffers. `empty` gives arrays of the one whose turn it is, while there is room."""

    def __init__(self) -> None:
        self._buffers = [mmap.mmap(-1, 1) for _ in range(BUFFERS)]
        self._number, self._used = -1, 0

    def turn(self) -> None:
        """Begin the next answer, in the next buffer."""
        self._number, self._used = (self._number + 1) % BUFFERS, 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any] | None:
        """An array of the buffer; None if there is no room."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if self._number < 0 or self._used + size > len(self._buffers[self._number]):
            return None
        array = np.frombuffer(self._buffers[self._number], dtype, int(np.prod(shape)), self._used).reshape(shape)
        self._used += -(-size // ALIGNED) * ALIGNED
        return array

    def send(self, pipe: connection.Connection, answer: Any) -> None:
        """Send a tree of arrays, or an error."""
        arrays = list(_arrays(answer)) if isinstance(answer, tuple) else []
        if sum(array.nbytes for array in arrays) < SMALL or not hasattr(os, "memfd_create"):
            pipe.send((self._number, answer))
            return
        strangers = [array for array in arrays if self._place(array) is None]
        if self._used + sum(array.nbytes + ALIGNED for array in strangers) > len(self._buffers[self._number]):
            self._grow(pipe, sum(array.nbytes + ALIGNED for array in arrays))
        pipe.send((self._number, _mapped(self._kept, answer)))

    def _kept(self, array: NDArray[Any]) -> Place:
        place = self._place(array)
        if place is None:
            copy = self.empty(array.shape, array.dtype)
            assert copy is not None
            copy[...] = array
            place = self._place(copy)
            assert place is not None
        return place

    def _place(self, array: NDArray[Any]) -> Place | None:
        """Where an array is, if it is in the buffer of this answer."""
        buffer = self._buffers[self._number]
        begin = array.ctypes.data - np.frombuffer(buffer, np.uint8, 1).ctypes.data
        inside = begin >= 0 and begin + array.nbytes <= len(buffer) and array.flags.c_contiguous and array.size
        return Place(begin, array.shape, array.dtype.str) if inside else None

    def _grow(self, pipe: connection.Connection, size: int) -> None:
        handle = os.memfd_create("dtrain-samples")
        try:
            os.ftruncate(handle, size)
            self._buffers[self._number], self._used = mmap.mmap(handle, size), 0
            pipe.send(Grown(self._number))
            reduction.send_handle(pipe, handle, os.getppid())
        finally:
            os.close(handle)


class Received:
    """In the rank: the buffers of a loading process."""

    def __init__(self) -> None:
        self._buffers = dict[int, mmap.mmap]()

    def receive(self, pipe: connection.Connection) -> Any:
        """The next answer: a tree of arrays that hold until the buffer's next turn, or an error."""
        message = pipe.recv()
        while isinstance(message, Grown):
            handle = reduction.recv_handle(pipe)
            try:
                self._buffers[message.number] = mmap.mmap(handle, os.fstat(handle).st_size)
            finally:
                os.close(handle)
            message = pipe.recv()
        number, answer = message
        if isinstance(answer, BaseException):
            return answer

        def array(leaf: Any) -> NDArray[Any]:
            if not isinstance(leaf, Place):
                return np.asarray(leaf)
            count = int(np.prod(leaf.shape))
            return np.frombuffer(self._buffers[number], leaf.dtype, count, leaf.begin).reshape(leaf.shape)

        return _mapped(array, answer)


_mine: list[Memory] = []
"""That of this loading process."""


def memory() -> Memory:
    """Set up a loading process."""
    _mine[:] = [Memory()]
    return _mine[0]


def empty(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array without values, in memory that is shared with the rank where a loading process has room there."""
    for each in _mine:
        array = each.empty(shape, dtype)
        if array is not None:
            return array
    return np.empty(shape, dtype)


def _mapped(change: Any, answer: Any) -> Any:
    if isinstance(answer, tuple):
        return tuple(_mapped(change, part) for part in answer)
    if isinstance(answer, Mapping):
        return {name: _mapped(change, part) for name, part in answer.items()}
    return change(answer)


def _arrays(answer: Any) -> Any:
    if isinstance(answer, tuple | Mapping):
        for part in answer.values() if isinstance(answer, Mapping) else answer:
            yield from _arrays(part)
    else:
        yield answer
