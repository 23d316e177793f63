"""The task of a node: it starts the agent as a process of its own, carries the agent's output to the driver, and ends
with it.

Executors get this file by value, and execute it before dtrain is known to be there: it imports the standard library
alone. `job` has the `folder` and the `python` version of the command, the `host`, `port` and `token` of its driver, and
the `nodes`, `command` and `environment` of the agents; without a command the task only looks.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

FRAME = ">BI"
"""Before each piece that is sent: the descriptor that the agent wrote to, or ENDED, and the number of bytes."""
ENDED = 0
CONNECT_SECONDS = 20.0
NEEDED = ("dtrain", "torch")
LOOK = "import importlib.util, sys; print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))"
OF_SPARK = ("SPARK_", "PYSPARK_", "PYTHON_WORKER_", "PYTHON_DAEMON_", "PYTHON_UNIX_DOMAIN_")
"""Beginnings of variables of Spark's own, one of which is the key of the worker's socket."""


def of(job: Mapping[str, Any]) -> Callable[[Any], Iterator[str]]:
    """The function that each task of a barrier executes."""

    def execute(_: Any) -> Iterator[str]:
        from pyspark import BarrierTaskContext

        return look_and_run(BarrierTaskContext.get(), job)

    return execute


def look_and_run(context: Any, job: Mapping[str, Any]) -> Iterator[str]:
    """The problems of all nodes, told by the first; if there are none, the agent runs to its end."""
    mine = f"{socket.gethostname()}: {problem}" if (problem := unfit(job)) else ""
    problems = sorted({each for each in context.allGather(mine) if each})
    if problems:
        return iter(problems if context.partitionId() == 0 else [])
    if job["command"]:
        resources = context.resources()
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(resources["gpu"].addresses)} if "gpu" in resources else {}
        run(job, job["nodes"][context.partitionId()], gpus)
    return iter([])


def unfit(job: Mapping[str, Any]) -> str:
    """The reason why this executor cannot be a node; empty if there is none."""
    python, folder = ".".join(map(str, sys.version_info[:2])), job["folder"]
    if python != job["python"]:
        return f"{sys.executable} is Python {python}, and the command's is {job['python']}"
    try:
        os.listdir(folder)  # noqa: PTH208 - nothing but the standard library's oldest parts is needed here
    except OSError as error:
        return (
            f"the working folder {folder} cannot be read there ({error.strerror}). Share it with the workers, or type "
            "launcher.folder=<the path of the code there>"
        )
    try:
        socket.create_connection((job["host"], job["port"]), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return (
            f"the command cannot be reached at {job['host']}:{job['port']} ({error.strerror or error}). Type "
            "launcher.address=<an address of the command's host that the workers reach>"
        )
    found = _answer([sys.executable, "-c", LOOK, *NEEDED], folder)
    missing = [name for name in NEEDED if name not in found.split()]
    if missing:
        return (
            f"{sys.executable} has no {' and no '.join(missing)}. Install dtrain there, or name an interpreter that "
            "has it: launcher.python=<path>"
        )
    return ""


def _answer(command: list[str], folder: str) -> str:
    try:
        return subprocess.run(
            command, cwd=folder, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
            errors="replace", timeout=60,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_SPARK)}


def run(job: Mapping[str, Any], node: int, gpus: Mapping[str, str]) -> None:
    """Returns when the agent has ended, by itself or because the driver has closed the connection."""
    with socket.create_connection((job["host"], job["port"]), timeout=CONNECT_SECONDS) as driver:
        driver.settimeout(None)
        driver.sendall(json.dumps({"token": job["token"], "number": job["number"], "node": node}).encode() + b"\n")
        agent = subprocess.Popen(
            [sys.executable, *job["command"][1:], "-"], cwd=job["folder"], env={**_environment(), **gpus},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            assert agent.stdin
            with contextlib.suppress(BrokenPipeError), agent.stdin:
                agent.stdin.write(json.dumps(job["environment"]).encode() + b"\n")
            _carry(agent, driver)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            code = agent.wait()
        with contextlib.suppress(OSError):
            driver.sendall(struct.pack(FRAME, ENDED, 4) + struct.pack(">i", code))


def _carry(agent: "subprocess.Popen[bytes]", driver: socket.socket) -> None:
    """Send what the agent writes, until it has ended or the driver goes."""
    assert agent.stdout and agent.stderr
    pipes = {agent.stdout.fileno(): 1, agent.stderr.fileno(): 2}
    while True:
        has_ended = agent.poll() is not None
        ready = select.select([driver.fileno(), *pipes], [], [], 0 if has_ended else 0.2)[0]
        if driver.fileno() in ready or (has_ended and not ready):
            return
        for pipe in ready:
            data = os.read(pipe, 1 << 16)
            if not data:
                del pipes[pipe]
                continue
            try:
                driver.sendall(struct.pack(FRAME, pipes[pipe], len(data)) + data)
            except OSError:
                return
