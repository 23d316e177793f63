"""Every node is an agent on this host (or on others, that join), and its ranks are forked from a process that already
holds torch.

    the command (no torch) ── server (holds torch) ─┬─ store process: the rendezvous store of one round
                                                    ├─ agent of node 0 ── ranks
                                                    └─ agent of node 1 ── ranks

Each process dies with the one that forked it, so nothing is left behind whatever is killed. Whatever but the command is
killed, the ranks start again from the last state: the server replaces agents and the store process, the command
replaces the server. Ranks leave what they have to say (the result, or the traceback) as files in a folder of their
round; the command shows the first traceback, which is the cause, and not those of the ranks that lost their peer.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dtrain.build import has_given
from dtrain.config import environment
from dtrain.errors import PreflightError, RankError, why
from dtrain.launcher import process
from dtrain.launcher.local.restarts import RestartLog
from dtrain.launcher.warm import BY_NVML
from dtrain.lifecycle import failure, signals
from dtrain.planned import Plan
from dtrain.result import Result
from dtrain.secrets import screen
from dtrain.storage import options, store
from dtrain.storage.disk import ROOM

ROOM_BYTES, ROOMS = 64 << 10, 64
"""Bytes that the report of a failing rank fits into, and the number of such rooms that are kept."""
END_SECONDS = 10.0
"""Processes that were killed are gone within this time, or it is said that they are not."""


@dataclass(frozen=True)
class Local:
    """The arguments are explained in conf/launcher/local.yaml."""

    restarts: int
    silence: float
    wait: float
    address: str | None
    here: int | None

    def command(self, plan: Plan) -> str:
        here = plan.nodes if self.here is None else self.here
        there = (
            f", {plan.nodes - here} elsewhere: python -m dtrain.launcher.local.agent {self.address}, with the same "
            f"{environment.SECRET}"
            if here < plan.nodes
            else ""
        )
        return (
            f"{sys.executable} -m dtrain.launcher.local.server: {here} agent(s) x {plan.devices} rank(s) on this "
            f"host{there}"
        )

    def launch(self, plan: Plan) -> Result:
        scratch, claim = _scratch(min(ROOMS, (1 + plan.world) * (1 + self.restarts)))
        told = {
            "plan": plan.to_dict(),
            "storage": options.hand_over(),
            **vars(self),
            "here": plan.nodes if self.here is None else self.here,
        }
        try:
            with _Wishes(scratch) as wishes:
                code = _serve(scratch, told, wishes)
                while code < 0 and not wishes.ends and _counted(scratch) <= self.restarts:
                    screen.complain(
                        f"the launcher's server was killed by {signal.Signals(-code).name} and starts again"
                    )
                    code = _serve(scratch, told, wishes)
            if wishes.again:
                raise KeyboardInterrupt
            if wishes.first and not _begun(scratch):
                raise signals.StopRequested(wishes.first)
            return _outcome(scratch, code)
        finally:
            _sweep(scratch)
            os.close(claim)


def _scratch(rooms: int) -> tuple[Path, int]:
    """The run's folder on the local disk, with room kept there for what its processes will say, and the descriptor that
    keeps it from being swept while no server lives. Raises PreflightError.
    """
    place, scratch = "TMPDIR", Path()
    try:
        scratch = store.scratch("launch")
        place = str(scratch.parent)
        for room in range(rooms):
            (scratch / f"{ROOM}-{room}").write_bytes(bytes(ROOM_BYTES))
        memory = process.memory(scratch)
        place = str(memory.parent)
        memory.mkdir(mode=0o700, exist_ok=True)
        (memory / ROOM).write_bytes(bytes(ROOM_BYTES))
        (memory / ROOM).unlink()
        return scratch, process.claim(scratch, "command")
    except OSError as error:
        if scratch.name.startswith("dtrain-"):
            _sweep(scratch)
        raise PreflightError(
            f"there is no room for the launcher's files in {place}: {why(error)}. Free some, or set TMPDIR=<another "
            "folder>."
        ) from error


def _sweep(scratch: Path) -> None:
    for folder in (scratch, process.memory(scratch)):
        shutil.rmtree(folder, ignore_errors=True)


class _Wishes:
    """The first signal reaches every rank as a wish to stop, through the server; the second ends all, as the first does
    where no rank was started yet.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.first, self.again = signals.stop_request(), False
        self.server: subprocess.Popen[bytes] | Forked | None = None

    @property
    def ends(self) -> bool:
        return self.again or (bool(self.first) and not _begun(self._scratch))

    def __enter__(self) -> "_Wishes":
        self._before = {number: signal.signal(number, self._note) for number in signals.WISHES}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.again = signals.heard(number) or self.again
        new, self.first = not self.first, self.first or number
        if new or self.ends:
            self.hand_on()

    def hand_on(self) -> None:
        """Pass the signal on to the server."""
        with contextlib.suppress(ProcessLookupError):
            if self.server and self.ends:
                os.killpg(self.server.pid, signal.SIGKILL)
            elif self.server:
                self.server.send_signal(self.first)


def _serve(scratch: Path, told: Mapping[str, Any], wishes: _Wishes) -> int:
    """Run a server to its end; its exit code. None of its processes lives afterwards."""
    with _held():  # the server begins with signals blocked, and loses none while it has no handler
        told = {**told, "wish": wishes.first}
        try:
            server = Forked(told, scratch) if has_given() else _started(told, scratch)
        except OSError as error:
            raise PreflightError(f"the launcher cannot start: {why(error)}.") from error
        wishes.server = server
    if wishes.first != told["wish"]:  # heard all the same: another thread of this process holds no signal back
        wishes.hand_on()
    try:
        return _await(server, told["silence"])
    finally:
        wishes.server = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        if not process.gone(process.memory(scratch), END_SECONDS):
            screen.complain(f"processes of group {server.pid} were killed and are still there: they wait for a device")


def _started(told: Mapping[str, Any], scratch: Path) -> "subprocess.Popen[bytes]":
    """A server that loads torch for itself."""
    # torch prints the stack of whatever lost its peer, beside the error it raises
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", BY_NVML: "1", **os.environ}
    server = subprocess.Popen(
        [sys.executable, "-m", "dtrain.launcher.local.server", str(os.getpid()), str(scratch)],
        stdin=subprocess.PIPE, start_new_session=True, env=environment,
    )  # fmt: skip
    assert server.stdin
    with contextlib.suppress(BrokenPipeError), server.stdin:
        server.stdin.write(json.dumps(told).encode())
    return server


class Forked:
    """A server that is forked from this process, because the run was given objects that only this process has. Raises
    PreflightError where no fork can use them.
    """

    def __init__(self, told: Mapping[str, Any], scratch: Path) -> None:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            raise PreflightError(
                "ranks are forked from this process, and CUDA, which no fork survives, was started in it. Call run "
                "before anything uses a GPU here, or give classes of a module that can be imported."
            )
        self._code: int | None = None
        self.pid = process.fork(lambda: self._serve(dict(told), scratch), "dtrain-server")

    @staticmethod
    def _serve(told: dict[str, Any], scratch: Path) -> None:
        from dtrain.launcher.local.server import serve

        os.setsid()
        serve(told, scratch)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """The exit code, negative for the signal that ended it."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _await(server: "subprocess.Popen[bytes] | Forked", silence: float) -> int:
    """The exit code of the server. One that was stopped for longer than a node may be silent is killed."""
    stopped: float | None = None
    while not process.is_gone(server.pid, 1.0):
        stopped = (stopped or time.monotonic()) if process.is_stopped(server.pid) else None
        if stopped and time.monotonic() - stopped > silence:
            screen.complain(
                f"the launcher's server (pid {server.pid}) was stopped (SIGSTOP) for {silence:g} s, and is ended"
            )
            server.kill()
    return server.wait()


@contextmanager
def _held() -> Iterator[None]:
    """Signals wait until the end of the context."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals.WISHES)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begun(scratch: Path) -> bool:
    """Whether ranks were started."""
    return (scratch / "book.json").exists()


def _counted(scratch: Path) -> int:
    """A server that was killed counts like a failed round; the next one reads it in the book."""
    book = RestartLog.read(scratch)
    book.failed(scratch, "the launcher's server was killed")
    book.write(scratch)
    return book.restarts


def _outcome(scratch: Path, code: int) -> Result:
    """The server's result, or the error of the rank that failed first."""
    path = scratch / "over.json"
    if not path.exists():
        raise RankError(f"{RestartLog.read(scratch).reason or 'the launcher ended'} (exit code {code})")
    over = json.loads(path.read_text())
    if over["asked"]:
        raise signals.StopRequested(over["asked"])
    folder = scratch / f"round-{over['round']}"
    if over.get("exit_code") == PreflightError.exit_code:
        raise PreflightError(over["error"])
    if over["error"]:
        error = RankError(over["error"])
        if folder.exists():
            error.facts = {**failure.explain(folder).facts, "message": over["error"]}
        raise error
    return failure.outcome(folder, code)
