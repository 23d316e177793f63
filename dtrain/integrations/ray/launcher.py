"""Nodes of a Ray cluster: an actor on each, on a node of its own, starts an agent as its child.

The actors are those of a process beside the command (driver.py) and end with it, as it ends with the command.
"""

import contextlib
import importlib.util
import json
import os
import select
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from dtrain.cluster import network
from dtrain.errors import PreflightError
from dtrain.integrations.ray import connection
from dtrain.launcher import process
from dtrain.launcher.local import attached
from dtrain.planned import Plan
from dtrain.result import Result

CONNECT_SECONDS = 60.0
"""Time for a process to import Ray and to connect to the cluster."""
STOP_SECONDS = 15.0
"""Time for the agents, and the process that speaks with Ray, to end."""


class Ray:
    """One node of the run on each of as many nodes of the cluster. `cluster`: the address of its head."""

    about: ClassVar = {"where": "elsewhere"}

    def __init__(self, *, cluster: str | None, restarts: int, silence: float, wait: float, address: str | None) -> None:
        connection.refuse(cluster, "launcher.cluster")
        self._cluster = cluster
        self._serving: dict[str, Any] = {"restarts": restarts, "silence": silence, "wait": wait, "address": address}
        self._driver: _Driver | None = None
        self._started = set[int]()

    def describe(self, plan: Plan) -> str:
        where = self._cluster or "RAY_ADDRESS, or the cluster of this host"
        needs = ", ".join(f"{count} {kind}" for kind, count in _needs(plan).items())
        return f"Ray at {where}: {plan.nodes} x {{{needs}}}: python -m dtrain.launcher.local.agent <address>"

    def launch(self, plan: Plan) -> Result:
        try:
            self.prepare(plan)
            assert self._driver
            address = self._serving["address"] or network.outward(self._driver.head)
            return attached.launch(plan, engine=self, **{**self._serving, "address": address})
        finally:
            self.stop()

    def prepare(self, plan: Plan) -> None:
        """Reserve the nodes, unless that was done before."""
        if importlib.util.find_spec("ray") is None:
            raise PreflightError("launcher=ray: Ray is not installed here. Type pip install 'dtrain[ray]'")
        self._request = {
            "cluster": self._cluster, "nodes": sorted(plan.allowed, reverse=True), "needs": _needs(plan),
            "folder": os.getcwd(), "wait": self._serving["wait"],  # noqa: PTH109 - as the environment's PWD is not
        }  # fmt: skip
        self._driver = self._driver or _Driver(self._request)

    def start(self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        if self._driver is None or self._driver.has_ended:
            self.stop()
            self._driver = _Driver(self._request)
        self._started.update(nodes)
        self._driver.send(start=[*nodes], command=[*command], environment={**environment})

    def alive(self) -> Collection[int]:
        if self._driver is not None:
            self._driver.listen(0.0)
            while self._driver.messages:
                self._started.discard(self._driver.messages.popleft()["ended"])
            if self._driver.has_ended:
                self._started.clear()
        return frozenset(self._started)

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.close()
        self._driver = None
        self._started.clear()


class _Driver:
    """The process that speaks with Ray, connected to the cluster, with its nodes reserved. Raises PreflightError."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._connection, theirs = socket.socketpair()
        self.messages, self._rest = deque[dict[str, Any]](), b""
        self.has_ended = self._is_ready = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "dtrain.integrations.ray.driver"], stdin=theirs.fileno(),
                start_new_session=True, preexec_fn=partial(process.die_with, os.getpid()),
            )  # fmt: skip
        try:
            self.send(**request)
            self.head = self._answer("head", CONNECT_SECONDS)
            self._answer("ready", None)
            self._is_ready = True
        except BaseException:
            self.close()
            raise

    def send(self, **message: Any) -> None:
        """`listen` notices a process that has ended."""
        with contextlib.suppress(ConnectionError):
            self._connection.sendall(f"{json.dumps(message)}\n".encode())

    def listen(self, seconds: float | None) -> None:
        """Read messages, of which the first may take `seconds`, or any time."""
        while not self.has_ended and select.select([self._connection], [], [], seconds)[0]:
            try:
                data = self._connection.recv(1 << 16)
            except ConnectionError:
                data = b""
            self.has_ended = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.messages.extend(map(json.loads, lines))
            seconds = 0.0

    def close(self) -> None:
        """End the agents, their actors and the process."""
        self._connection.close()
        if not self._is_ready:
            self._process.kill()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, key: str, seconds: float | None) -> Any:
        if not self.messages:
            self.listen(seconds)
        if self.messages:
            message = self.messages.popleft()
            if "problems" in message:
                raise PreflightError(*(f"launcher=ray: {problem}" for problem in message["problems"]))
            return message[key]
        if self.has_ended:
            code = self._process.wait()
            raise PreflightError(f"launcher=ray: the process that speaks with Ray ended (exit code {code}).")
        raise PreflightError(f"launcher=ray: the cluster did not answer within {seconds:g} s. Try: ray status")


def _needs(plan: Plan) -> dict[str, int]:
    """The resources of Ray that a node takes."""
    gpus = {"GPU": plan.devices} if plan.device == "cuda" else {}
    return {"CPU": plan.devices * plan.threads, **gpus}
