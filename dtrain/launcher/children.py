"""Processes that an engine starts on this host, such as ssh, mpirun or srun: one for each node, or one for several."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial

from dtrain.errors import PreflightError, why
from dtrain.launcher import process

STOP_SECONDS = 5.0
"""Time for the processes to end after SIGTERM."""


class Children:
    """They have sessions of their own, so that a Ctrl-C reaches the command alone, and die with it."""

    def __init__(self) -> None:
        self._nodes = dict["subprocess.Popen[bytes]", frozenset[int]]()

    def start(
        self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str], *, stdin: bytes = b""
    ) -> None:
        """Start one process for `nodes`. `environment`: beside that of this process. Raises PreflightError if the
        command cannot be executed.
        """
        try:
            child = subprocess.Popen(
                command, env={**os.environ, **environment}, stdin=subprocess.PIPE, start_new_session=True,
                preexec_fn=partial(process.die_with, os.getpid()),
            )  # fmt: skip
        except OSError as error:
            raise PreflightError(f"{command[0]} cannot be started: {why(error)}.") from error
        self._nodes[child] = frozenset(nodes)
        assert child.stdin
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(stdin)

    def alive(self) -> frozenset[int]:
        """The nodes whose process has not ended."""
        self._nodes = {child: nodes for child, nodes in self._nodes.items() if child.poll() is None}
        return frozenset().union(*self._nodes.values())

    def stop(self) -> None:
        """End every process and its children: by SIGTERM, and by SIGKILL after a while."""
        deadline = time.monotonic() + STOP_SECONDS
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in self._nodes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, number)
            while number == signal.SIGTERM and self.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        for child in self._nodes:
            child.wait()
        self._nodes.clear()
