"""A scheduler of which the queue is this host: a job is one process, which serves the run there."""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

from dtrain.launcher.local import attached
from dtrain.planned import Plan
from dtrain.result import Result


class Queued:
    """`note`: a file that gets what a job was submitted with."""

    about: ClassVar = {"where": "elsewhere", "detached": True}
    detach = False
    inside = False

    def __init__(self, *, note: str) -> None:
        self._note, self._jobs = Path(note), dict[str, subprocess.Popen[bytes]]()

    def describe(self, plan: Plan) -> str:
        return f"a job of {plan.nodes} nodes"

    def launch(self, plan: Plan) -> Result:
        return attached.launch(plan, restarts=0, silence=15, wait=60, address=None, here=plan.nodes)

    def submit(self, plan: Plan, environment: Mapping[str, str]) -> str:
        command = [sys.executable, "-m", "dtrain", "run", plan.out]
        self._note.write_text("\n".join([*command, *(f"{name}={value}" for name, value in environment.items())]))
        with self._note.with_name("log").open("a") as log:
            job = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
        self._jobs[str(job.pid)] = job
        return str(job.pid)

    def jobs(self, out: str) -> Collection[str]:
        return [name for name, job in self._jobs.items() if job.poll() is None]

    def waiting(self, job: str) -> str:
        return ""

    def cancel(self, job: str, *, save: bool) -> None:
        self._jobs[job].send_signal(signal.SIGTERM if save else signal.SIGKILL)

    def log(self, out: str, job: str) -> Path:
        return self._note.with_name("log")

    def notes(self, plan: Plan) -> Collection[str]:
        return ()

    def reading(self, out: str, job: str) -> AbstractContextManager[object]:
        return nullcontext()
