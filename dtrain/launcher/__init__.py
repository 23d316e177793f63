"""Launchers start the ranks: they own processes and restarts, and know nothing of models.

An engine (ssh, mpirun, a cluster's scheduler) is a launcher that starts one process per node: dtrain's agent, which
joins the run's server. The server, rounds, restarts and the ranks themselves are the same under every engine
(dtrain/launcher/local). docs/engines.md shows how one is written.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from dtrain.planned import Plan
from dtrain.result import Result


class Launcher(Protocol):
    def describe(self, plan: Plan) -> str:
        """The command, script or manifest that starts the ranks, as `dtrain plan` prints it. Nothing is looked up."""
        ...

    def launch(self, plan: Plan) -> Result:
        """Run the plan's loop on every rank. Raises RankError with the traceback of the first rank to fail."""
        ...


class Engine(Protocol):
    """Starts one process for each node. `dtrain.launcher.local.attached.launch` serves a run with it, and calls these
    methods from one thread.
    """

    def prepare(self, plan: Plan) -> None:
        """Look whether the nodes of a plan can be started. Raises PreflightError or WordsError with the problems of
        all of them.
        """
        ...

    def start(self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Execute `command` on each of these nodes, in a folder with the same code, and return at once. It is called
        again for nodes whose process has ended.

        `environment`: variables to set beside those that are there. They hold the run's secret: they may pass through
        an environment or a standard input, never through arguments or a file that others can read. Raises
        PreflightError.
        """
        ...

    def alive(self) -> Collection[int]:
        """The nodes whose process was started and has not ended, as far as this host can tell."""
        ...

    def stop(self) -> None:
        """End the processes of all nodes, and return when they have ended."""
        ...


class Detached(Launcher, Protocol):
    """A scheduler: the run is a job that does not need the command. `submit` queues a job that executes `dtrain run
    <out>` on its first node, and there `launch` serves the run. Its word states the fact `detached`.
    """

    detach: bool
    """Whether the command ends once the job is queued."""

    @property
    def inside(self) -> bool:
        """Whether this process is in a job already: nothing is submitted then, and `launch` uses its nodes."""
        ...

    def submit(self, plan: Plan, environment: Mapping[str, str]) -> str:
        """Queue the job and return its name. `environment` as in `Engine.start`. Raises PreflightError."""
        ...

    def submit_workers(self, plan: Plan, command: Sequence[str], environment: Mapping[str, str]) -> str:
        """Queue a job of workers of the sweep at `plan.out`: `command` on each of its nodes, as soon as there is room
        for one. Each has room for `plan.devices` ranks. Returns the job's name. Raises PreflightError.
        """
        ...

    def jobs(self, out: str) -> Collection[str]:
        """The names of jobs of the run at `out` that have not ended. Raises PreflightError if nobody answers."""
        ...

    def waiting(self, job: str) -> str:
        """Why a job has not begun, or does not go on, as a sentence; what changes all the time follows a semicolon.
        Empty while it runs. Raises PreflightError if nobody answers.
        """
        ...

    def cancel(self, job: str, *, save: bool) -> None:
        """Ask the run of a job to save and stop, or end the job at once. Nobody is waited for."""
        ...

    def notes(self, plan: Plan) -> Iterable[str]:
        """A sentence for each word that may stand, and is most often a mistake. Nothing is looked up."""
        ...

    def log(self, out: str, job: str) -> Path:
        """The file of this host that what the job says is appended to, once it runs."""
        ...

    def reading(self, out: str, job: str) -> AbstractContextManager[object]:
        """A context in which that file is kept up to date. At its end everything is there."""
        ...
