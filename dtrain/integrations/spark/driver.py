"""The barrier jobs of a run: threads beside a session of Spark, in the driver's process or in the command's own."""

import contextlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.cluster import network
from dtrain.config.word import cut
from dtrain.integrations.spark import task

HELLO_BYTES, HELLO_SECONDS = 1 << 10, 10.0
"""Size of the first line of a connection, and the time for it."""
COUNT_SECONDS = 5.0
LEAVE_SECONDS = 5.0
"""Time for the agents to end once their connections are closed."""
Tell = Callable[..., None]


class Jobs:
    """Barrier jobs with one task for each node. `host`: where the tasks connect to. `folder`: the working folder there.

    `tell(ended=<node>, number=<its job>)` is called when an agent has ended, and `tell(problems=<sentences>)` if a job
    fails, from threads.
    """

    def __init__(self, context: Any, host: str, folder: str, tell: Tell) -> None:
        from pyspark import cloudpickle

        cloudpickle.register_pickle_by_value(task)  # type: ignore[no-untyped-call] # it has no types
        self._context, self._folder, self._tell = context, folder, tell
        self._door, self._token = network.listen(host, 0), secrets.token_hex(16)
        self._group = f"dtrain-{os.getpid()}-{self._door.getsockname()[1]}"
        self._links, self._lock, self._stopping = dict[tuple[int, int], socket.socket](), threading.Lock(), False
        self._running = list[threading.Thread]()
        threading.Thread(target=self._open, daemon=True).start()

    def look(self, most: int, fewest: int) -> list[str]:
        """The problems of the executors, if there are enough of them. `tell(executors=<number>)` is called until
        then.
        """
        over = threading.Event()
        threading.Thread(target=self._count, args=(over,), daemon=True).start()
        try:
            return self._barrier(self._job(0, range(most), [], {}), most, fewest)
        finally:
            over.set()

    def _count(self, over: threading.Event) -> None:
        with contextlib.suppress(Exception):  # of py4j, once the session is gone
            while not over.wait(COUNT_SECONDS):
                # the driver counts as one of them
                self._tell(executors=self._context._jsc.sc().getExecutorMemoryStatus().size() - 1)

    def start(self, number: int, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the agents of `nodes`; as many as there is room for."""
        job = self._job(number, nodes, command, environment)
        thread = threading.Thread(target=self._run, args=(job,), daemon=True)
        self._running = [each for each in self._running if each.is_alive()] + [thread]
        thread.start()

    def stop(self) -> None:
        """End all agents and jobs."""
        self._stopping = True
        with self._lock:
            for link in self._links.values():
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + LEAVE_SECONDS
        for thread in self._running:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._running):
            self._context.cancelJobGroup(self._group)
        self._door.close()

    def _job(
        self, number: int, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]
    ) -> dict[str, Any]:
        host, port = self._door.getsockname()[:2]
        return {
            "number": number, "nodes": [*nodes], "command": [*command], "environment": {**environment}, "host": host,
            "port": port, "token": self._token, "folder": self._folder,
            "python": ".".join(map(str, sys.version_info[:2])),
        }  # fmt: skip

    def _run(self, job: Mapping[str, Any]) -> None:
        problems = self._barrier(job, min(len(job["nodes"]), max(1, self._slots())), 1)
        if problems and not self._stopping:
            self._tell(problems=problems)
        for node in job["nodes"]:
            self._tell(ended=node, number=job["number"])

    def _barrier(self, job: Mapping[str, Any], count: int, fewest: int) -> list[str]:
        """Run a job of `count` tasks to its end, or of fewer if there is no room for them; its problems."""
        problems = list[str]()
        while count >= fewest:
            for node in job["nodes"][count:]:
                self._tell(ended=node, number=job["number"])
            try:
                self._context.setJobGroup(self._group, "dtrain: an agent on each node")
                rdd = self._context.parallelize(range(count), count)
                return [*rdd.barrier().mapPartitions(task.of(job)).collect()]
            except Exception as error:  # of py4j, or of pyspark, which has several
                problems = [reason(str(error), count)]
                if "SPARK-24819" not in str(error) or self._stopping:
                    break
            count = min(count - 1, max(fewest, self._slots()))
        return problems

    def _slots(self) -> int:
        """Tasks that the executors can run at the same time, as far as Spark's cores tell."""
        return int(self._context.defaultParallelism) // int(self._context.getConf().get("spark.task.cpus", "1"))

    # the connections of the tasks

    def _open(self) -> None:
        while True:
            try:
                link, _ = self._door.accept()
            except OSError:  # it is closed
                return
            threading.Thread(target=self._listen, args=(link,), daemon=True).start()

    def _listen(self, link: socket.socket) -> None:
        with link, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            link.settimeout(HELLO_SECONDS)
            with link.makefile("rb") as stream:
                hello = json.loads(stream.readline(HELLO_BYTES))
                if not hmac.compare_digest(str(hello["token"]), self._token):
                    return
                if self._stopping:
                    return
                link.settimeout(None)
                who = int(hello["number"]), int(hello["node"])
                with self._lock:
                    self._links[who] = link
                try:
                    self._carry(stream)
                finally:
                    with self._lock:
                        del self._links[who]
                    self._tell(ended=who[1], number=who[0])

    def _carry(self, stream: Any) -> None:
        """Write what an agent writes, by whole lines, until it has ended."""
        size, begun = struct.calcsize(task.FRAME), {1: b"", 2: b""}
        while len(head := stream.read(size)) == size:
            kind, count = struct.unpack(task.FRAME, head)
            if kind == task.ENDED:
                break
            data = begun[kind] + stream.read(count)
            end = 1 + max(data.rfind(b"\n"), data.rfind(b"\r"))
            begun[kind] = data[end:]
            self._tell(output=data[:end], to=kind)
        for kind, rest in begun.items():
            self._tell(output=rest, to=kind)


def write(to: int, data: bytes) -> None:
    """Write all of it to a descriptor."""
    while data:
        data = data[os.write(to, data) :]


def reason(text: str, nodes: int) -> str:
    """Why a job failed, as a sentence, from an error of Spark."""
    if "SPARK-24819" in text:
        return (
            f"Spark has no room for {nodes} node(s): each needs a free executor with the cores and GPUs of a node. Add "
            "workers, type nodes=<fewer>, or set the cores of a node: launcher.conf={spark.executor.cores: 1, "
            "spark.task.cpus: 1}."
        )
    if match := re.search(r"ExecutorLostFailure \(executor (\S+)", text):
        return f"executor {match[1]} of Spark was lost: it, its worker or its host has ended."
    if "UnsupportedClassVersionError" in text:
        return "this Java is too old for Spark. Install Java 17, or set JAVA_HOME to it."
    if match := re.search(r'Cannot run program "([^"]+)"', text):
        return f"an executor has no {match[1]}. Type launcher.python=<its path on the workers>, or set PYSPARK_PYTHON."
    if match := re.search(r"\[PYTHON_VERSION_MISMATCH\] ([^.]*(?:\.\d[^.]*)*)\.", text):
        return f"{match[1].strip()}. Type launcher.python=<such an interpreter on the workers>, or set PYSPARK_PYTHON."
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("at ")]
    said = [line for line in lines if re.match(r"(?:Caused by: )?[\w.$]*(?:Exception|Error)\b|\[[A-Z_]+\]|: ", line)]
    return cut((said or lines or ["it gave no reason"])[-1].removeprefix(": ").rstrip("."), 400) + "."
