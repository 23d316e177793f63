"""Encodes documents on all cores, in their order. Processes take groups of them; if one dies, another encodes its
group.

They are interpreters of their own, without torch: this process has threads, whose locks a fork would copy.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import dtrain
from dtrain.errors import PreflightError
from dtrain.tokenizer import SERIAL, NotText, Tokenizer, Vocabulary, kind_of
from dtrain.tokenizer.worker import ERROR, pack, unpack

GROUP_BYTES, GROUP_DOCUMENTS = 1 << 20, 1024
"""A group has at least as much of one of these, unless it is the last. It is a part of the format of token shards."""
ALONE = 4 << 20
"""Bytes that are encoded here before other processes are started, which takes a while."""
TRIES = 3
"""Processes that may die at one group."""
NONE = -1


class Document(NamedTuple):
    """`name` of where it is, for messages."""

    name: str
    text: bytes


class Encoded(NamedTuple):
    """`lengths` in tokens of a group of documents, and the tokens of all."""

    lengths: NDArray[np.int64]
    tokens: NDArray[Any]


def encode(documents: Iterable[Document], tokenizer: Tokenizer, *, processes: int) -> Iterator[Encoded]:
    """The tokens of groups of documents, in order, whatever the number of processes. Raises PreflightError for a
    document that is not UTF-8.
    """
    groups = _groups(documents)
    if processes < 2 or not isinstance(tokenizer, Vocabulary):  # bytes need no work
        for group in groups:
            yield _here(group, tokenizer)
        return
    size = 0
    for group in groups:
        yield _here(group, tokenizer)
        size += sum(len(each.text) for each in group)
        if size >= ALONE:
            break
    else:
        return
    with Pool(tokenizer, processes) as pool:
        yield from pool.encoded(groups)


class Pool:
    """Processes that encode groups of documents; they end with this context, or with this process."""

    def __init__(self, tokenizer: Vocabulary, processes: int) -> None:
        self._tokenizer, self._kind, self._limit = tokenizer, kind_of(tokenizer.vocab), processes
        self._programs = dict[Connection, subprocess.Popen[bytes]]()
        self._idle = list[Connection]()
        self._busy = dict[Connection, int]()
        """The group that a process encodes; NONE while it starts."""
        self._deaths = Counter[int]()

    def __enter__(self) -> "Pool":
        for _ in range(self._limit):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs.values():
            program.kill()
        for pipe in list(self._programs):
            self._end(pipe)

    @property
    def pids(self) -> list[int]:
        return [program.pid for program in self._programs.values()]

    def encoded(self, groups: Iterator[Sequence[Document]]) -> Iterator[Encoded]:
        """Each group's tokens, in order; as many groups are read ahead as twice the processes."""
        waiting, known, done = deque[int](), dict[int, Sequence[Document]](), dict[int, Encoded]()
        read = given = 0
        more = True
        while more or known:
            if more and len(known) < 2 * self._limit:
                group = next(groups, None)
                more = group is not None
                if group is not None:
                    known[read] = group
                    waiting.append(read)
                    read += 1
            self._give(waiting, known)
            is_full = not more or len(known) >= 2 * self._limit
            self._collect(waiting, known, done, timeout=None if is_full and given not in done and known else 0)
            while given in done:
                del known[given]
                yield done.pop(given)
                given += 1

    def _give(self, waiting: deque[int], known: Mapping[int, Sequence[Document]]) -> None:
        while waiting and self._idle:
            pipe, number = self._idle.pop(), waiting.popleft()
            try:
                pipe.send_bytes(pack([each.text for each in known[number]]))
                self._busy[pipe] = number
            except OSError:
                self._died(pipe, number, waiting, known)

    def _collect(
        self, waiting: deque[int], known: Mapping[int, Sequence[Document]], done: dict[int, Encoded],
        timeout: float | None,
    ) -> None:  # fmt: skip
        """Take the answers that come within `timeout` seconds."""
        for pipe in wait(list(self._busy), timeout):
            assert isinstance(pipe, Connection)
            number = self._busy.pop(pipe)
            try:
                answer = pipe.recv_bytes()
            except (EOFError, OSError):
                self._died(pipe, number, waiting, known)
                continue
            self._idle.append(pipe)
            if number != NONE:
                done[number] = self._answer(answer, known[number])

    def _died(
        self, pipe: Connection, number: int, waiting: deque[int], known: Mapping[int, Sequence[Document]]
    ) -> None:
        self._end(pipe)
        self._deaths[number] += 1
        if self._deaths[number] == TRIES:
            work = f"encoded {_between(known[number])}" if number != NONE else "started"
            raise PreflightError(f"{TRIES} processes died while they {work}. Is there enough memory? Try fewer.")
        if number != NONE:
            waiting.appendleft(number)
        self._start()

    def _answer(self, answer: bytes, group: Sequence[Document]) -> Encoded:
        if answer[:1] == ERROR:
            kind, *said = answer[1:].decode().split("\n", 3)
            if kind == "text":
                raise _refusal(group, NotText(*map(int, said)))
            raise PreflightError(said[0])
        lengths, tokens = unpack(answer[1:])
        return Encoded(lengths, np.frombuffer(tokens, self._kind))

    def _start(self) -> None:
        """Start a process; its first message says that it can be given work."""
        here, there = socket.socketpair()
        root = str(Path(dtrain.__file__).parents[1])
        paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": paths, "RAYON_NUM_THREADS": "1", SERIAL: "false"}
        with there, tempfile.TemporaryFile() as written:
            written.write(self._tokenizer.written)
            written.flush()
            program = subprocess.Popen(
                [sys.executable, "-m", "dtrain.tokenizer.worker", str(there.fileno()), str(written.fileno())],
                pass_fds=[there.fileno(), written.fileno()], env=environ, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        pipe = Connection(here.detach())
        self._programs[pipe], self._busy[pipe] = program, NONE

    def _end(self, pipe: Connection) -> None:
        program = self._programs.pop(pipe)
        program.kill()
        program.wait()
        pipe.close()


def _here(group: Sequence[Document], tokenizer: Tokenizer) -> Encoded:
    try:
        each = tokenizer.encode_all([one.text for one in group])
    except NotText as error:
        raise _refusal(group, error) from None
    return Encoded(np.array([len(tokens) for tokens in each], np.int64), np.concatenate(each))


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups that depend on their sizes and order alone."""
    group, size = list[Document](), 0
    for one in documents:
        group.append(one)
        size += len(one.text)
        if size >= GROUP_BYTES or len(group) >= GROUP_DOCUMENTS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _refusal(group: Sequence[Document], error: NotText) -> PreflightError:
    name = group[error.number].name
    return PreflightError(f"{name}: {error}. Write it again as UTF-8, such as with iconv -f WINDOWS-1252 -t UTF-8.")


def _between(group: Sequence[Document]) -> str:
    return group[0].name if len(group) == 1 else f"the {len(group)} texts from {group[0].name} on"
