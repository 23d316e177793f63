"""A worker: `dtrain sweep work` in a process of its own, which somebody else started and whose end is noted.

python -m dtrain.sweep.worker <root> <words> [-]     started by an engine; with `-`, variables are read from
                                                     standard input: a line of JSON
<sweep.out>/workers/<crew>-<host>-<pid>.json         its exit code, and the end of its complaints
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dtrain.config.environment import HANDED, SOURCE, SWEEP_BEGAN, WORKERS
from dtrain.errors import PreflightError, StoreError
from dtrain.launcher import process
from dtrain.lifecycle import signals
from dtrain.result import source_digest
from dtrain.secrets import masked, screen
from dtrain.storage import options, store

TAIL = 4000
"""Characters of what a worker complained of last that are told when it fails."""


class Watch(Protocol):
    def is_over(self) -> bool:
        """Whether the worker is to have its jobs save, and to end."""
        ...


@dataclass(frozen=True)
class Command:
    """The command that a worker serves, on the same host: its pid, and a file that is there until it asks to stop."""

    pid: int
    wanted: str

    def is_over(self) -> bool:
        return not Path(self.wanted).exists() or process.is_gone(self.pid, 0)


class Signals:
    """The signals that this process gets."""

    def __init__(self) -> None:
        signals.listen()

    def is_over(self) -> bool:
        return bool(signals.stop_request())


def work(_: Any, words: Sequence[str], watch: Watch | None, began: float) -> tuple[int, str]:
    """Run `dtrain sweep work <words>`. Returns its exit code and the end of what it complained of. `began`: when the
    command did; what failed since is not run again.
    """
    with tempfile.TemporaryFile() as complaints:
        child = subprocess.Popen(
            [sys.executable, "-m", "dtrain", "sweep", "work", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
            preexec_fn=partial(process.die_with, os.getpid()),
            env={**os.environ, SWEEP_BEGAN: str(began)},
        )
        asked = False
        while child.poll() is None:
            if watch and not asked and watch.is_over():
                child.terminate()  # its jobs save
                asked = True
            time.sleep(0.1)
        complaints.seek(0)
        return child.returncode, complaints.read().decode(errors="replace")[-TAIL:]


def ends(root: str, crew: str) -> list[tuple[int, str]]:
    """The exit codes and complaints of the workers of a crew that have ended by themselves. Raises StoreError."""
    place = store.join(root, "workers")
    names = [name for name in store.children(place) if name.startswith(f"{crew}-")]
    found = [json.loads(store.read(store.join(place, name))) for name in names]
    return [(end["code"], end["complaints"]) for end in found]


def main(arguments: Sequence[str]) -> int:
    """The exit code of the worker."""
    if arguments[-1:] == ["-"]:
        process.die_with(os.getppid())  # whose end is that of the connection to the command
        os.environ.update(json.loads(sys.stdin.readline()))
        arguments = arguments[:-1]
    root, watch = arguments[0], Signals()
    if os.environ[SOURCE] == source_digest("dtrain"):
        code, complaints = work(None, arguments, watch, float(os.environ[SWEEP_BEGAN]))
    else:
        code = PreflightError.exit_code
        complaints = "the source of dtrain here differs from that of the command. Install the same one."
    if code >= 0 and not watch.is_over():
        end = {"code": code, "complaints": f"{socket.gethostname()}: {masked(complaints.strip())}"}
        name = f"{os.environ[WORKERS]}-{socket.gethostname()}-{os.getpid()}.json"
        options.take_over(os.environ[HANDED])
        store.write(store.join(root, "workers", name), json.dumps(end).encode())
    return abs(code)


if __name__ == "__main__":
    screen.outlive_readers()
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except StoreError as error:
        screen.complain(str(error))
        sys.exit(error.exit_code)
