"""Ranks started by torchrun, or by anything else that sets RANK and WORLD_SIZE; this process is one of them.

A rank ends with the launcher that supervises it: without one, nobody would end or restart it.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from dtrain.launcher import process, run_here
from dtrain.lifecycle import unwatched
from dtrain.planned import Plan
from dtrain.result import Result

SUPERVISED = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_STEP_ID")
"""Environment variables of launchers that supervise their ranks. A shell is none: it may end before its ranks."""

LOOK_SECONDS = 1.0


class External:
    def describe(self, plan: Plan) -> str:
        return f"torchrun --nnodes {plan.nodes} --nproc-per-node {plan.devices} -m dtrain <the same words>"

    def launch(self, plan: Plan) -> Result:
        os.environ.setdefault("LOCAL_RANK", str(int(os.environ["RANK"]) % plan.devices))
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
