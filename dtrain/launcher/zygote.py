"""A process that has loaded torch and forks others: each starts in milliseconds, where a new interpreter takes seconds.

    command ── zygote (loads torch while the command goes on) ── the launcher's server, once for each launch

It is forked before its command has any thread, and has no thread, no CUDA and no process group itself, because no fork
survives them. It holds Python, torch and the loop, in pages that all its children share. It ends with its command, and
its children with it.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from dtrain.build import locate
from dtrain.launcher import process
from dtrain.launcher.title import retitle
from dtrain.launcher.warm import load
from dtrain.lifecycle import signals

NAME = "dtrain-zygote"
"""The name of the process, for `ps` and `top`."""


class Child:
    """A process forked by a zygote: a part of the interface of `subprocess.Popen`."""

    def __init__(self, zygote: "Zygote", pid: int) -> None:
        self.pid, self._zygote = pid, zygote
        self._code: int | None = None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for the signal that ended it. Raises subprocess.TimeoutExpired."""
        if timeout is not None and self._code is None and not process.is_gone(self.pid, timeout):
            raise subprocess.TimeoutExpired(NAME, timeout)
        if self._code is None:
            self._code = self._zygote.wait(self.pid)
        return self._code


class Zygote:
    """The process, seen from the one that needs children of it. Raises OSError if it cannot be forked."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        self.pid, self.ended = process.fork(lambda: _serve(self._connection, theirs), NAME), False
        theirs.close()
        self._replies = self._connection.makefile()
        self._prepared: list[Any] = []

    def fork(self, function: str, *arguments: Any) -> Child:
        """Fork a child that calls `function`, a dotted name, with `arguments`, which JSON can hold. It has a session of
        its own and the environment of this process; stop signals are blocked in it.

        Raises ConnectionError if the zygote has ended.
        """
        return Child(self, self._ask(function=function, arguments=arguments, environment=dict(os.environ)))

    def prepare(self, function: str, *arguments: Any) -> None:
        """Call `function` in the zygote itself, unless the last call was the same: what it imports, every later child
        has. It must start no thread. Raises ConnectionError if the zygote has ended.
        """
        if self._prepared != [function, *arguments]:
            self._ask(prepare=function, arguments=arguments)
            self._prepared = [function, *arguments]

    def wait(self, pid: int) -> int:
        """The exit code of a child, once it has ended."""
        try:
            return self._ask(pid=pid)
        except ConnectionError:  # its children died with it
            return -signal.SIGKILL

    def close(self) -> None:
        """End the zygote, and the children that still live."""
        self.ended = True
        self._replies.close()
        self._connection.close()
        process.kill(self.pid)

    def _ask(self, **request: Any) -> int:
        if self.ended:
            raise ConnectionResetError("the zygote has ended")
        try:
            os.kill(self.pid, signal.SIGCONT)  # somebody may have stopped it (SIGSTOP)
            self._connection.sendall(f"{json.dumps(request)}\n".encode())
            return int(self._replies.readline())
        except (ConnectionError, ValueError) as error:
            self.ended = True
            raise ConnectionResetError("the zygote has ended") from error


def _serve(parents: socket.socket, connection: socket.socket) -> None:
    """Answer the requests that come over the connection until it is closed: fork, or wait for, a child."""
    parents.close()
    retitle(f"{NAME} {os.getppid()} {tempfile.gettempdir()}")
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOP_SIGNALS)  # they are for the command, which passes them on
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    load()
    with connection.makefile() as requests:
        for line in requests:
            request = json.loads(line)
            acts: dict[str, Callable[..., int]] = {
                "pid": _wait,
                "prepare": _prepare,
                "function": partial(_fork, connection),
            }
            reply = next(act for name, act in acts.items() if name in request)(**request)
            connection.sendall(f"{reply}\n".encode())


def _prepare(prepare: str, arguments: list[Any]) -> int:
    locate(prepare)(*arguments)
    gc.freeze()
    return 0


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(connection: socket.socket, function: str, arguments: list[Any], environment: dict[str, str]) -> int:
    """The pid of a child, which has its session by now."""
    reading, writing = os.pipe()

    def work() -> None:
        connection.close()
        os.setsid()
        os.close(writing)
        os.environ.clear()
        os.environ.update(environment)
        locate(function)(*arguments)

    pid = process.fork(work, f"dtrain-{function.split('.')[-2]}")
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    return pid


_kept: list[Zygote | None] = []


@contextmanager
def kept() -> Iterator[None]:
    """A context in which `begin` may fork a zygote, which ends with it."""
    _kept.append(None)
    try:
        yield
    finally:
        zygote = _kept.pop()
        if zygote:
            zygote.close()


def begin(*, threads: bool = False) -> None:
    """Have a zygote where one is kept, unless this process has threads. `threads`: even then.

    Raises OSError if it cannot be forked.
    """
    if not _kept or (threading.active_count() > 1 and not threads):
        return
    if _kept[-1] and _kept[-1].ended:
        _kept[-1].close()
        _kept[-1] = None
    _kept[-1] = _kept[-1] or Zygote()


def prepare(function: str, *arguments: Any) -> None:
    """Have the zygote call a function, as `Zygote.prepare` says, if there is one."""
    with contextlib.suppress(ConnectionError):
        if _kept and _kept[-1]:
            _kept[-1].prepare(function, *arguments)


def fork(function: str, *arguments: Any) -> Child | None:
    """A child of the zygote, as `Zygote.fork` says; None if there is none."""
    with contextlib.suppress(ConnectionError):
        return _kept[-1].fork(function, *arguments) if _kept and _kept[-1] else None
    return None


def kill() -> None:
    """Kill the zygote, if there is one: a `fork` that waits for it returns None."""
    if _kept and _kept[-1]:
        os.kill(_kept[-1].pid, signal.SIGKILL)
