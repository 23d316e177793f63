"""Serves a run from the command: starts the server and, if it was killed, starts it again; passes stop signals on, and
shows the outcome.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from dtrain.build import has_given, refuse_given
from dtrain.cluster import network
from dtrain.errors import PreflightError, RankError, why
from dtrain.launcher import Engine, process, zygote
from dtrain.launcher.local.restarts import RestartLog
from dtrain.launcher.local.started import StartedAgents
from dtrain.launcher.zygote import Child
from dtrain.lifecycle import failure, signals
from dtrain.planned import Plan
from dtrain.result import Result
from dtrain.secrets import screen
from dtrain.storage import options, store
from dtrain.storage.disk import ROOM

ROOM_BYTES, ROOMS = 64 << 10, 64
"""Disk space reserved for the report of a failing rank, and the most reports that space is reserved for."""
END_SECONDS = 10.0
"""Killed processes that are still there after this time are reported."""


def launch(
    plan: Plan,
    *,
    restarts: int,
    silence: float,
    wait: float,
    address: str | None,
    here: int = 0,
    engine: Engine | None = None,
) -> Result:
    """Serve the run from this command: the server forks the agents of `here` nodes of this host, `engine` starts those
    of the others; without one, they are started by hand. `restarts`, `silence`, `wait` and `address` as in
    conf/launcher/local.yaml; an engine's agents need no address of the user's.

    Raises what `Launcher.launch` does, and PreflightError for an address that cannot be served.
    """
    _refuse_cuda()
    if engine:
        refuse_given()
        engine.prepare(plan)
    try:
        address = network.meeting(address) if address or engine else None
    except (OSError, ValueError) as error:
        reason = why(error) if isinstance(error, OSError) else error
        raise PreflightError(f"launcher.address={address}: {reason}. Type one of this host that is free.") from error
    scratch, claim = _scratch(min(ROOMS, (1 + plan.world) * (1 + restarts)))
    request: dict[str, Any] = {"restarts": restarts, "silence": silence, "wait": wait, "address": address, "here": here}
    request |= {"plan": plan.to_dict(), "storage": options.hand_over()}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(zygote.kept() if has_given() else contextlib.nullcontext())
            agents = stack.enter_context(StartedAgents(engine, plan, scratch, request)) if engine else None
            stop = stack.enter_context(_StopSignals(scratch))
            code = _serve(scratch, request, stop, agents)
            while code < 0 and not stop.ends and _count_restart(scratch) <= restarts:
                screen.complain(f"the launcher's server was killed by {signal.Signals(-code).name} and starts again")
                code = _serve(scratch, request, stop, agents)
        if stop.again:
            raise KeyboardInterrupt
        if stop.first and not _begun(scratch):
            raise signals.StopRequested(stop.first)
        return _outcome(scratch, code)
    finally:
        process.remove(scratch)
        os.close(claim)


def _refuse_cuda() -> None:
    """Raises PreflightError where ranks must be forked from this process, and CUDA was started in it."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if has_given() and cuda is not None and cuda.is_initialized():
        raise PreflightError(
            "ranks are forked from this process, and CUDA, which no fork survives, was started in it. Call run "
            "before anything uses a GPU here, or give classes of a module that can be imported."
        )


def _scratch(reports: int) -> tuple[Path, int]:
    """The run's folder on the local disk, with space reserved for reports of its processes, and the descriptor that
    claims it while no server lives. Raises PreflightError.
    """
    parent, scratch = "TMPDIR", Path()
    try:
        scratch = store.scratch("launch")
        parent = str(scratch.parent)
        for number in range(reports):
            (scratch / f"{ROOM}-{number}").write_bytes(bytes(ROOM_BYTES))
        memory = process.memory(scratch)
        parent = str(memory.parent)
        memory.mkdir(mode=0o700, exist_ok=True)
        (memory / ROOM).write_bytes(bytes(ROOM_BYTES))
        (memory / ROOM).unlink()
        return scratch, process.claim(scratch, "command")
    except OSError as error:
        if scratch.name.startswith("dtrain-"):
            process.remove(scratch)
        raise PreflightError(
            f"there is no room for the launcher's files in {parent}: {why(error)}. Free some, or set TMPDIR=<another "
            "folder>."
        ) from error


class _StopSignals:
    """The first signal asks every rank to stop, through the server. The second ends all processes, as the first does
    before any rank was started.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self.first, self.again = 0, False
        self.server: subprocess.Popen[bytes] | Child | None = None

    @property
    def ends(self) -> bool:
        return self.again or (bool(self.first) and not _begun(self._scratch))

    def __enter__(self) -> "_StopSignals":
        self._before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
        signals.install(dict.fromkeys(signals.STOP_SIGNALS, self._note))
        self.first = self.first or signals.stop_request()  # one may have arrived before
        return self

    def __exit__(self, *_: object) -> None:
        signals.install(self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.again = signals.note(number) or self.again
        new, self.first = not self.first, self.first or number
        if new or self.ends:
            self.forward()

    def forward(self) -> None:
        """Send the signal on to the server, or kill it, or what is about to fork it."""
        with contextlib.suppress(ProcessLookupError):
            if not self.server and self.ends:
                zygote.kill()
            elif self.server and self.ends:
                os.killpg(self.server.pid, signal.SIGKILL)
            elif self.server:
                self.server.send_signal(self.first)


def _serve(scratch: Path, request: Mapping[str, Any], stop: _StopSignals, agents: StartedAgents | None) -> int:
    """Run a server to its end; its exit code. None of its processes lives afterwards."""
    if stop.ends:
        return -signal.SIGKILL
    request = {**request, "stop_request": stop.first}
    server: subprocess.Popen[bytes] | Child | None
    try:
        if has_given():  # only forks of this process have its objects
            zygote.begin(threads=True)
        server = zygote.fork("dtrain.launcher.local.server.forked", request, str(scratch))
        if not (server or stop.ends or has_given()):
            server = _start(request, scratch)
    except OSError as error:
        raise PreflightError(f"the launcher cannot start: {why(error)}.") from error
    if not server:
        return -signal.SIGKILL
    stop.server = server
    if stop.first != request["stop_request"]:  # it arrived meanwhile
        stop.forward()
    try:
        return _await(server, request["silence"], agents)
    finally:
        stop.server = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        if not process.gone(process.memory(scratch), END_SECONDS):
            screen.complain(f"processes of group {server.pid} were killed and are still there: they wait for a device")


def _start(request: Mapping[str, Any], scratch: Path) -> "subprocess.Popen[bytes]":
    """A server in a new interpreter."""
    with signals.blocked():  # it loses none before it has a handler
        server = subprocess.Popen(
            [sys.executable, "-m", "dtrain.launcher.local.server", str(os.getpid()), str(scratch)],
            stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    assert server.stdin
    with contextlib.suppress(BrokenPipeError), server.stdin:
        server.stdin.write(json.dumps(request).encode())
    return server


def _await(server: "subprocess.Popen[bytes] | Child", silence: float, agents: StartedAgents | None) -> int:
    """The exit code of the server. It is killed if it is stopped (SIGSTOP) for longer than a node may be silent."""
    stopped: float | None = None
    if agents:
        agents.tend()
    while not process.is_gone(server.pid, 1.0):
        if agents:
            agents.tend()
        stopped = (stopped or time.monotonic()) if process.is_stopped(server.pid) else None
        if stopped and time.monotonic() - stopped > silence:
            screen.complain(
                f"the launcher's server (pid {server.pid}) was stopped (SIGSTOP) for {silence:g} s, and is ended"
            )
            server.kill()
    return server.wait()


def _begun(scratch: Path) -> bool:
    """Whether ranks were started."""
    return RestartLog.path(scratch).exists()


def _count_restart(scratch: Path) -> int:
    """Restarts in a row, including this one: a killed server counts like a failed round; the next server reads it."""
    log = RestartLog.read(scratch)
    log.failed(scratch, "the launcher's server was killed")
    log.write(scratch)
    return log.restarts


def _outcome(scratch: Path, code: int) -> Result:
    """The server's result, or the error of the rank that failed first."""
    path = scratch / "over.json"
    if not path.exists():
        raise RankError(f"{RestartLog.read(scratch).reason or 'the launcher ended'} (exit code {code})")
    over = json.loads(path.read_text("utf-8"))
    if over["stopped_by"]:
        raise signals.StopRequested(over["stopped_by"])
    folder = scratch / f"round-{over['round']}"
    if over.get("exit_code") == PreflightError.exit_code:
        raise PreflightError(*over["error"].splitlines())
    if over["error"]:
        error = RankError(over["error"])
        if folder.exists():
            error.facts = {**failure.explain(folder).facts, "message": over["error"]}
        raise error
    return failure.outcome(folder)
