"""Nodes that a launcher of MPI starts: mpirun of Open MPI, mpiexec of MPICH and Intel MPI, or srun --mpi=<kind>.

One process of it starts an agent on each node. Ranks talk by dtrain's backend; nothing here calls MPI.
"""

import shlex
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dtrain.config.word import cut
from dtrain.errors import PreflightError, WordsError, why
from dtrain.launcher import sbatch
from dtrain.launcher.children import Children
from dtrain.launcher.local import attached
from dtrain.planned import Plan
from dtrain.result import Result

OPEN_MPI = ("--np", "{nodes}", "--map-by", "node", "--bind-to", "none")
HYDRA = ("-n", "{nodes}", "-ppn", "1")
ARGUMENTS: Mapping[str, Sequence[str]] = {
    "Open MPI": OPEN_MPI, "OpenRTE": OPEN_MPI, "HYDRA": HYDRA, "Intel(R) MPI": HYDRA,
    "slurm": ("--nodes={nodes}", "--ntasks={nodes}", "--ntasks-per-node=1", "--overlap", "--input=none"),
}  # fmt: skip
"""Text of the answer to --version -> arguments for one process on each node."""
OF_MPI = (
    "n", "np", "c", "N", "ppn", "perhost", "ppr", "npernode", "npersocket", "pernode", "map-by", "bind-to", "app",
    "configfile", "wdir", "wd", "output-filename",
)  # fmt: skip
OF_SRUN = (
    "nodes", "ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "output", "error",
    "input", "export", "export-file", "chdir",
)  # fmt: skip
"""Options of processes, their place and their output, which the plan states."""
VERSION_SECONDS = 30.0


class Mpi:
    """`command`: the launcher, with arguments of yours, such as `mpirun --hostfile hosts`."""

    about: ClassVar = {"where": "elsewhere"}

    def __init__(self, *, command: str, restarts: int, silence: float, wait: float, address: str | None) -> None:
        try:
            self._command = shlex.split(command)
        except ValueError as error:
            raise WordsError(f"launcher.command={cut(command)}: {error}. Quote it as in a shell.") from error
        if not self._command:
            raise WordsError("launcher.command is empty. Type launcher.command=mpirun.")
        self._serving: dict[str, Any] = {"restarts": restarts, "silence": silence, "wait": wait, "address": address}
        self._arguments, self._passes_all, self._children = list[str](), True, Children()

    def describe(self, plan: Plan) -> str:
        """Raises WordsError for options that the plan states."""
        if wrong := [each for each in self._command[1:] if _is_stated(each, by=self._command[0])]:
            raise WordsError(
                f"launcher.command: {cut(wrong[0])!r} is not yours to say: dtrain starts one agent on each of "
                f"nodes={plan.nodes}, in this folder, and shows what it says. Leave it out; type nodes=<hosts> "
                "devices=<ranks of a host>."
            )
        return f"{shlex.join(self._command)}: {plan.nodes} x python -m dtrain.launcher.local.agent <address>"

    def launch(self, plan: Plan) -> Result:
        return attached.launch(plan, engine=self, **self._serving)

    def prepare(self, plan: Plan) -> None:
        self.describe(plan)
        version = self._version()
        kind = next((kind for kind in ARGUMENTS if kind in version), None)
        if kind is None:
            raise PreflightError(
                f"launcher.command={self._command[0]} is no launcher of Open MPI, MPICH, Intel MPI or Slurm: "
                f"--version says {cut(version.strip())!r}."
            )
        self._arguments = [argument.format(nodes=plan.nodes) for argument in ARGUMENTS[kind]]
        self._passes_all = ARGUMENTS[kind] is not OPEN_MPI  # it passes the variables that are named

    def start(self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        named = [] if self._passes_all else [part for name in environment for part in ("-x", name)]
        self._children.start(nodes, [*self._command, *self._arguments, *named, *command], environment)

    def alive(self) -> Collection[int]:
        return self._children.alive()

    def stop(self) -> None:
        self._children.stop()

    def _version(self) -> str:
        try:
            answer = subprocess.run(
                [self._command[0], "--version"], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
                errors="replace", timeout=VERSION_SECONDS,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise PreflightError(
                f"launcher=mpi: there is no {self._command[0]} here. Install openmpi-bin or mpich, or type "
                "launcher.command=<its path>."
            ) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = why(error) if isinstance(error, OSError) else f"no answer within {VERSION_SECONDS:g} s"
            raise PreflightError(f"launcher=mpi: {self._command[0]} --version: {reason}.") from error
        return answer.stdout + answer.stderr


def _is_stated(argument: str, *, by: str) -> bool:
    """Whether an argument of a launcher says how many processes are started, where, or what; `:` begins others."""
    if "srun" not in Path(by).name:
        return argument == ":" or (argument.startswith("-") and argument.lstrip("-").partition("=")[0] in OF_MPI)
    try:
        return argument.startswith("-") and sbatch.stated(sbatch.option(argument).name) in OF_SRUN
    except ValueError:
        return False
