"""Processes that another launcher has started: ranks (torchrun, srun, mpirun, ...), or one process for each node (a
PyTorchJob, SageMaker, Vertex AI, ...). dtrain/cluster/environments.py lists them.

A rank ends with the launcher that supervises it: without one, nobody would end or restart it. A node's process becomes
an agent, and that of the first node serves the run: rounds, restarts and recovery are those of `launcher=local`.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from dtrain.build import has_given
from dtrain.cluster import Cluster, network
from dtrain.cluster.allocation import OF_RANKS, adopt, external
from dtrain.cluster.allocation import External as Place
from dtrain.config.environment import SECRET, WAIT
from dtrain.config.facts import fact
from dtrain.errors import EXIT_CODES, PreflightError, RankError
from dtrain.launcher import process
from dtrain.launcher.local import attached
from dtrain.launcher.local.started import agent_command
from dtrain.launcher.meeting import meeting
from dtrain.launcher.rank import run_here
from dtrain.lifecycle import signals, unwatched
from dtrain.planned import Plan
from dtrain.result import Result

SUPERVISED = (
    "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "JSM_NAMESPACE_RANK", "SLURM_STEP_ID"
)  # fmt: skip
"""Environment variables of launchers that supervise their ranks. A shell is none: it may end before its ranks."""

LOOK_SECONDS = 1.0
STARTS = {
    "torchrun": "torchrun --nnodes {nodes} --nproc-per-node {devices}",
    "Open MPI": "mpirun -np {ranks} python",
    "MPICH": "mpiexec -n {ranks} python",
    "srun": "srun --nodes={nodes} --ntasks-per-node={devices} python",
}
"""Launcher of ranks -> its command, up to -m."""


class External:
    """The arguments are explained in conf/launcher/external.yaml; `restarts` and `silence` are those of nodes."""

    def __init__(self, *, restarts: int, silence: float, wait: float) -> None:
        self._serving: dict[str, Any] = {"restarts": restarts, "silence": silence, "wait": wait}
        self._wait = wait

    def describe(self, plan: Plan) -> str:
        place = external(os.environ)
        if place and place.kind == "nodes":
            return f"{plan.nodes} processes that {place.row.name} started: an agent each, the first also serves the run"
        start = STARTS.get(place.row.name if place else "", STARTS["torchrun"])
        return f"{start.format(nodes=plan.nodes, devices=plan.devices, ranks=plan.world)} -m dtrain <the same words>"

    def launch(self, plan: Plan) -> Result:
        place = external(os.environ)
        assert place, "resolve has refused this launcher"
        on_one_host = place.kind == "ranks" and plan.nodes == 1
        addressed = place.address or place.world == 1
        with (
            nullcontext((place.address, place.port))
            if addressed
            else meeting(plan.out, place, on_one_host=on_one_host, wait=self._wait)
        ) as (host, port):
            if place.kind == "nodes":
                return self._node(plan, place, host, port)
            adopt(os.environ, place, local_world=plan.devices)
            if not addressed:
                os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
            os.environ[WAIT] = str(self._wait)
            return _rank(plan)

    def _node(self, plan: Plan, place: Place, host: str, port: int) -> Result:
        """Serve the run from the first node, and join it from the others."""
        if has_given():
            raise PreflightError(
                "objects that were passed to dtrain.run exist in this process alone, and the ranks run in others. Put "
                "their classes into a module that the nodes have too."
            )
        for variable in OF_RANKS:
            os.environ.pop(variable, None)
        host = host if place.rank else _own(host)
        if weakness := network.weakness(host, os.environ):
            raise PreflightError(weakness)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if place.rank == 0:
            return attached.launch(plan, here=1, address=address, **self._serving)
        code = _ended(agent_command(address, self._wait))
        status = next((status for status, number in EXIT_CODES.items() if number == code and code != 1), None)
        if status:
            return Result(status, plan.steps if status == "finished" else 0, None, 0.0)
        if code == PreflightError.exit_code:
            raise PreflightError(f"node {place.rank} has no part in the run at {address}.")
        raise RankError(f"the run at {address} has failed: the first node says why, and failure.json under {plan.out}")


def is_rank(plan: Plan, cluster: Cluster) -> bool:
    """Whether this process is a rank of the plan, which another launcher started."""
    around = fact(plan.launcher, "where") == "around"
    return around and cluster.external is not None and cluster.external.kind == "ranks"


def is_first(plan: Plan, cluster: Cluster) -> bool:
    """Whether this process writes what belongs to the run, of those that another launcher started."""
    started = fact(plan.launcher, "where") == "around" or fact(plan.launcher, "detached")
    return not started or cluster.external is None or cluster.external.rank == 0


def _own(host: str) -> str:
    """An address of this host at which the other nodes know it as `host`."""
    try:
        network.listen(host, 0).close()
        known = host != "localhost" or not os.environ.get(SECRET)
    except (OSError, UnicodeError):  # the name is not known yet, or that of a service in front of this host
        known = False
    return host if known else network.outward()


def _ended(command: Sequence[str]) -> int:
    """Execute a command and pass stop signals on to it. Returns its exit code."""
    children, early = list["subprocess.Popen[bytes]"](), list[int]()

    def forward(number: int, _: object) -> None:
        for child in children:
            child.send_signal(number)
        if not children:
            early.append(number)

    before = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    signals.install(dict.fromkeys(signals.STOP_SIGNALS, forward))
    try:
        children.append(
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=partial(process.die_with, os.getpid()),
            )
        )  # fmt: skip
        for number in early:
            forward(number, None)
        return children[0].wait()
    finally:
        signals.install(before)


def _rank(plan: Plan) -> Result:
    # torch prints the stack of whatever lost its peer, beside the error it raises
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    launcher = launcher_of(os.getppid(), os.environ)
    if launcher:
        threading.Thread(target=_die_with, args=(launcher,), name="dtrain-launcher", daemon=True).start()
    return run_here(plan, launcher=launcher)


def launcher_of(parent: int, environ: Mapping[str, str]) -> int | None:
    """The process that supervises this rank: its nearest ancestor outside the rank. A shell around this process has
    the rank's variables too.
    """
    mark = next((f"{name}=" for name in SUPERVISED if name in environ), None)
    while mark and parent > 1 and _has(parent, mark.encode()):
        parent = process.parent_of(parent)
    return parent if mark and parent > 1 else None


def _has(pid: int, mark: bytes) -> bool:
    """Whether a process was started with this variable; False for another user's process."""
    try:
        return any(entry.startswith(mark) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False


def _die_with(launcher: int) -> None:
    while not process.is_gone(launcher, LOOK_SECONDS):
        continue
    sentence = f"the launcher of the ranks (pid {launcher}) is gone: it was killed, and no rank outlives it"
    unwatched.give_up(unwatched.reports(), int(os.environ["RANK"]), sentence, kind="lost")
