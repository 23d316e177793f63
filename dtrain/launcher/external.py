"""The ranks are already running, this process is one of them: torchrun, or anything that sets RANK and WORLD_SIZE.

A rank does not outlive the launcher that watches over it: without one nobody would end it, and nobody start it again.
"""

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from dtrain.config import environment
from dtrain.launcher import process, run_here
from dtrain.lifecycle import unwatched
from dtrain.planned import Plan
from dtrain.result import Result

SUPERVISED = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_STEP_ID")
"""Variables by which launchers mark what they start and watch over. A shell that started ranks in the background may
end before them.
"""

LOOK_SECONDS = 1.0


class External:
    def command(self, plan: Plan) -> str:
        return f"torchrun --nnodes {plan.nodes} --nproc-per-node {plan.devices} -m dtrain <the same words>"

    def launch(self, plan: Plan) -> Result:
        os.environ.setdefault("LOCAL_RANK", str(int(os.environ["RANK"]) % plan.devices))
        os.environ.setdefault(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        )  # torch prints the stack of whatever lost its peer, beside the error it raises
        launcher = launcher_of(os.getppid(), os.environ)
        if launcher:
            threading.Thread(target=_die_with, args=(launcher,), name="dtrain-launcher", daemon=True).start()
        return run_here(plan, launcher=launcher)


def launcher_of(parent: int, environ: Mapping[str, str]) -> int | None:
    """The process that watches over this rank: its nearest ancestor that was not started as a rank itself, as a shell
    around this process was.
    """
    mark = next((f"{name}=" for name in SUPERVISED if name in environ), None)
    while mark and parent > 1 and _has(parent, mark.encode()):
        parent = process.parent_of(parent)
    return parent if mark and parent > 1 else None


def _has(pid: int, mark: bytes) -> bool:
    """Whether a process was started with this variable; of another user's processes it is not told."""
    try:
        return any(entry.startswith(mark) for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return False


def _die_with(launcher: int) -> None:
    while not process.is_gone(launcher, LOOK_SECONDS):
        continue
    folder = os.environ.get(environment.REPORTS)
    sentence = f"the launcher of the ranks (pid {launcher}) is gone: it was killed, and no rank outlives it"
    unwatched.give_up(Path(folder) if folder else None, int(os.environ["RANK"]), sentence, kind="lost")
