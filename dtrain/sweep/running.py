"""A job in its slot: its process, the signs of life it gives, and how it ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.launcher import process, zygote
from dtrain.launcher.zygote import Child
from dtrain.lifecycle.kernel_log import memory_kills
from dtrain.sweep import folder
from dtrain.sweep.folder import Job
from dtrain.sweep.log import Log
from dtrain.sweep.proposer import Ended


@dataclass
class Running:
    """`began`: by the monotonic clock; `patience`: seconds after which it counts as lost without a sign of life."""

    job: Job
    slot: int
    child: "Child | subprocess.Popen[bytes]"
    scratch: Path
    log: Log
    began: float
    microbatch: int
    patience: float
    memory_kills: int
    """Of the host, when it began."""
    suspended: float = 0.0
    """Seconds for which it has been stopped (SIGSTOP)."""

    @property
    def is_lost(self) -> bool:
        return self.suspended > self.patience

    def look(self, seconds: float) -> None:
        """Look for a sign of life, so long after the last look. A job that is lost is ended."""
        self.suspended = self.suspended + seconds if process.is_stopped(self.child.pid) else 0.0
        if self.is_lost:
            self.child.kill()

    def cause(self, root: str) -> Mapping[str, Any]:
        """The failure.json that it wrote itself; empty if it wrote none."""
        cause = folder.failure(root, self.job.name)
        return cause if cause.get("time", 0) > time.time() - (time.monotonic() - self.began) else {}

    def outcome(self, root: str) -> Ended:
        """How it ended, once its process has: as that says, or its watchdog."""
        code = self.child.wait()
        with suppress(OSError, ValueError, TypeError):
            return Ended(**json.loads((self.scratch / "outcome.json").read_text("utf-8")))
        if self.is_lost:
            limit = f"{self.patience:g} s (backend.timeout)"
            return Ended("failed", 1, "lost", f"it was suspended (SIGSTOP) for {limit} and counts as lost")
        if code == -signal.SIGKILL and memory_kills() > self.memory_kills:
            return Ended("failed", 1, "memory", "its process was killed by the kernel: out of memory")
        if code < 0:
            return Ended("failed", 1, "killed", f"its process was killed by {signal.Signals(-code).name}")
        if cause := self.cause(root):
            return Ended("failed", 1, str(cause.get("kind")), str(cause.get("error")))
        return Ended("failed", 1, "exited", f"its process ended with exit code {code} and without a word")


def start(arguments: Sequence[Any], modules: Sequence[str]) -> "Child | subprocess.Popen[bytes]":
    """The process of a job: a child of the zygote, which has imported `modules`; where none can be forked, because this
    process has threads, a new interpreter. Raises OSError.
    """
    zygote.begin()
    zygote.prepare("dtrain.sweep.job.prepare", modules)
    if forked := zygote.fork("dtrain.sweep.job.run", *arguments):
        return forked
    code = (
        "import json, sys; from dtrain.launcher import process; process.die_with(int(sys.argv[1])); "
        "from dtrain.sweep.job import run; run(*json.load(sys.stdin))"
    )
    command = [sys.executable, "-c", code, str(os.getpid())]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert child.stdin
    with suppress(BrokenPipeError), child.stdin:
        child.stdin.write(json.dumps(arguments).encode())
    return child
