"""Every node is an elastic agent on this host, and its ranks are forked from a process that already holds torch.

    the command (no torch) ── server (holds torch, no threads) ─┬─ store keeper: the rendezvous outlives any agent
                                                                ├─ agent of node 0 ── ranks
                                                                └─ agent of node 1 ── ranks

Each process dies with the one that forked it, so nothing is left behind whatever is killed. Ranks leave what they have to say
(the result, or the traceback) as files in a scratch folder; the command shows the first traceback, which is the cause, and not
those of the ranks that lost their peer. Run as a module this file is the server: it reads the plan from standard input.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from dtrain import failure, store
from dtrain.launcher import run_rank
from dtrain.plan import Plan
from dtrain.result import Result

GRACE_SECONDS = 5.0
"""After one agent failed, the others get this long to end by themselves."""


@dataclass(frozen=True)
class Local:
    """`restarts`: how often a failed group of ranks is started again."""

    restarts: int

    def command(self, plan: Plan) -> str:
        return f"{sys.executable} -m dtrain.launcher.local: {plan.nodes} agent(s) x {plan.devices} rank(s) on this host"

    def launch(self, plan: Plan) -> Result:
        scratch = store.scratch("launch")
        server = subprocess.Popen(
            [sys.executable, "-m", "dtrain.launcher.local", str(scratch), str(self.restarts)], stdin=subprocess.PIPE, start_new_session=True
        )
        asked: list[int] = []

        def forward(number: int, frame: FrameType | None) -> None:
            """The first signal reaches every rank as a wish to stop; the second ends them."""
            asked.append(number)
            wish = signal.SIGINT if number == signal.SIGINT else signal.SIGUSR1
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, wish if len(asked) == 1 else signal.SIGKILL)

        before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
        try:
            assert server.stdin
            with contextlib.suppress(BrokenPipeError):
                server.stdin.write(json.dumps(plan.to_dict()).encode())
                server.stdin.close()
            code = server.wait()
            if len(asked) > 1:
                raise KeyboardInterrupt
            return failure.outcome(scratch, code)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
            shutil.rmtree(scratch, ignore_errors=True)


# server


def main(scratch: Path, restarts: int) -> int:
    """Fork the keeper and one agent per node; the exit code says whether all agents succeeded."""
    from dtrain import stop

    _die_with_parent()
    stop.listen()
    plan = Plan.from_dict(json.load(sys.stdin))
    _warm(plan)
    _, port = fork_keeper()
    agents = {fork(partial(_agent, plan, node, port, restarts, scratch)): node for node in range(plan.nodes)}
    failed, deadline = False, float("inf")
    while agents:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in agents:
            del agents[pid]
            if status and not failed:
                failed, deadline = True, time.monotonic() + GRACE_SECONDS
        elif pid == 0:
            time.sleep(0.02)
        if time.monotonic() > deadline:
            for agent in agents:
                os.kill(agent, signal.SIGKILL)
            deadline = float("inf")
    return int(failed)


def _warm(plan: Plan) -> None:
    """Load here, once, what every rank needs: the fork costs milliseconds, the imports seconds."""
    import torch
    import torch._dynamo  # the first optimizer would import it, in every rank

    import dtrain.train  # noqa: F401

    for part in (plan.strategy, plan.optim, plan.model):
        with contextlib.suppress(ImportError):  # the rank says what is wrong with it
            __import__(str(part["_target_"]).rsplit(".", 1)[0])
    torch.set_num_threads(1)


def fork_keeper() -> tuple[int, int]:
    """A process that holds the rendezvous store: its pid, and the port it listens on."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported without saying so

    reading, writing = os.pipe()

    def keep() -> None:
        os.close(reading)
        held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(held.port).encode())
        os.close(writing)
        while True:
            time.sleep(3600)

    pid = fork(keep)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return pid, int(pipe.read())


def _agent(plan: Plan, node: int, port: int, restarts: int, scratch: Path) -> None:
    """One node: an elastic agent that starts, watches and restarts its ranks."""
    import logging

    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    # Ctrl-C is a wish for the ranks; the agent itself ends only by SIGTERM
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGHUP,SIGQUIT"
    # the ranks' own traceback is shown once, by the command; the agent would print it again, victims first
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # the agent's other threads are the store client and a timer; neither holds a lock that a rank uses
    warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
    rendezvous = get_rendezvous_handler(
        RendezvousParameters(
            "c10d", f"127.0.0.1:{port}", run_id=scratch.name, min_nodes=plan.nodes, max_nodes=plan.nodes, local_addr="127.0.0.1", is_host=False
        )
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=plan.devices,
        entrypoint=_rank,
        args=(plan, scratch),
        rdzv_handler=rendezvous,
        max_restarts=restarts,
        monitor_interval=0.05,
        master_addr="127.0.0.1",
    )
    logs = scratch / f"agent-{node}"
    logs.mkdir()
    agent = LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=str(logs)), start_method="fork")
    run = agent.run()
    for rank in run.failures:
        (scratch / f"ended-{rank}").touch()
    sys.exit(1 if run.is_failed() else 0)


def _rank(plan: Plan, scratch: Path) -> None:
    """One rank, in a process of its own."""
    _die_with_parent()
    rank = int(os.environ["RANK"])
    (scratch / f"began-{rank}").touch()
    try:
        result = run_rank(plan, forked=True)
    except BaseException as error:  # torch has exceptions that are no Exception
        failure.leave(scratch, rank, error)
    else:
        if rank == 0:
            store.write(str(scratch / "result.json"), json.dumps(result.to_dict()).encode())
        return
    sys.stdout.flush()
    os._exit(1)


def fork(work: Callable[[], Any]) -> int:
    """A child that does `work` and ends, and that dies when this process does. Its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _die_with_parent()
        work()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """Linux: get SIGKILL when the process that forked this one ends, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == 1:  # it ended before the line above
            os._exit(1)


if __name__ == "__main__":
    # the module object that ranks unpickle and the one that runs must be the same
    from dtrain.launcher import local

    sys.exit(local.main(Path(sys.argv[1]), int(sys.argv[2])))
