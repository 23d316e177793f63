"""Nodes that are tasks of a barrier job of Spark. Each task starts an agent as a process of its own; Spark neither
restarts nor distributes anything.

The driver is a child of the command, or the session of Spark that the command's process has already (`fit`).
The run's secret goes to the tasks with their code, as safe as Spark's own connections are (spark.authenticate,
spark.network.crypto.enabled): no argument, setting, event log or file holds it.
"""

import contextlib
import importlib.util
import json
import os
import queue
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from dtrain.cluster import network
from dtrain.config.environment import SECRET
from dtrain.config.word import cut
from dtrain.errors import PreflightError, WordsError, why
from dtrain.integrations.spark.driver import Jobs, write
from dtrain.launcher import process
from dtrain.launcher.local import attached
from dtrain.planned import Plan
from dtrain.result import Result
from dtrain.secrets import redact_arg, screen

OPEN_SECONDS = 90.0
"""Time for a session of Spark, beside the time for its executors."""
TELL_SECONDS = 10.0
"""Time between two notes of what is waited for."""
CONNECT_SECONDS = 10.0
END_SECONDS, KILL_SECONDS = 10.0, 3.0
"""Time for the driver and its JVM to end by themselves, and after a signal."""
OF_SECRETS = re.compile(r"(?i)secret|password|token|access[.]?key")
"""Names of settings that Spark itself hides (spark.redaction.regex)."""
MASTER = re.compile(r"spark://([^,/]+:\d+)((?:,[^,/]+:\d+)*)")


class Spark:
    """`master`: as spark-submit takes it; null: that of spark-defaults.conf. `conf`: further settings of Spark.
    `folder`: the working folder on the workers; null: as here. `python`: the interpreter there.
    """

    about: ClassVar = {"where": "elsewhere"}

    def __init__(
        self, *, master: str | None, conf: Mapping[str, Any], folder: str | None, python: str | None, restarts: int,
        silence: float, wait: float, address: str | None,
    ) -> None:  # fmt: skip
        if strange := [name for name in conf if not name.startswith("spark.")]:
            raise WordsError(
                f"launcher.conf: {cut(strange[0])!r} is no setting of Spark; they begin with spark. Type "
                "launcher.conf={spark.executor.memory: 4g}."
            )
        for name, value in conf.items():
            if OF_SECRETS.search(name) or redact_arg(f"{name}={_text(value)}") != f"{name}={_text(value)}":
                raise WordsError(
                    f"launcher.conf: {cut(name)} holds a secret, and would be an argument that others can read. Put it "
                    "into spark-defaults.conf."
                )
        self._master, self._conf, self._wait = master, conf, wait
        self._folder, self._python = folder or str(Path.cwd()), python or os.environ.get("PYSPARK_PYTHON")
        self._serving: dict[str, Any] = {"restarts": restarts, "silence": silence, "wait": wait, "address": address}
        self._driver: Driver | None = None
        self._asked = dict[str, Any]()
        self._number, self._alive = 0, dict[int, int]()
        """The jobs so far, and node -> the job of its agent."""

    def describe(self, plan: Plan) -> str:
        settings = self._settings(plan)
        return "\n".join(
            [
                f"barrier job of Spark: {plan.nodes} x python -m dtrain.launcher.local.agent <address>",
                *(f"    {name}={settings[name]}" for name in settings),
            ]
        )

    def launch(self, plan: Plan) -> Result:
        try:
            return attached.launch(plan, engine=self, **self._serving)
        finally:
            self.stop()

    def prepare(self, plan: Plan) -> None:
        """Open the session. Raises PreflightError unless there are executors for the nodes, and they can be nodes."""
        address = self._serving["address"] or network.outward()
        try:
            host = network.endpoint(network.listening(address))[0]
            network.listen(host, 0).close()
        except (OSError, ValueError) as error:
            reason = why(error) if isinstance(error, OSError) else error
            raise PreflightError(f"launcher.address={address}: {reason}.") from error
        self._asked = {
            "conf": self._settings(plan), "host": host, "folder": self._folder,
            "nodes": [plan.nodes, min(plan.allowed)],
        }  # fmt: skip
        self._driver = self._open()
        self._await_ready(self._driver)

    def start(self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        if self._driver is None or not self._driver.alive():
            self.stop()
            self._driver = self._open()
        self._number += 1
        self._alive |= dict.fromkeys(nodes, self._number)
        self._driver.send(number=self._number, nodes=[*nodes], command=[*command], environment=dict(environment))

    def alive(self) -> Collection[int]:
        if self._driver is None:
            return ()
        is_alive = self._driver.alive()
        for event in self._driver.events():
            for problem in event.get("problems", []):
                screen.complain(f"launcher=spark: {problem}")
            if "ended" in event and self._alive.get(event["ended"]) == event["number"]:
                del self._alive[event["ended"]]
        if not is_alive:
            self._alive.clear()
        return frozenset(self._alive)

    def stop(self) -> None:
        if self._driver:
            self._driver.stop()
        self._driver, self._alive = None, {}

    def _open(self) -> "Driver":
        session = _session()
        if session and self._master in (None, session.sparkContext.master):
            return Here(session.sparkContext, self._asked)
        return Child(self._asked, self._python or sys.executable)

    def _await_ready(self, driver: "Driver") -> None:
        """Tell what is waited for. Raises PreflightError if it cannot serve the nodes, or not in time."""
        told = time.monotonic()
        deadline, waits_for = told + OPEN_SECONDS + self._wait, "a session of Spark"
        while (now := time.monotonic()) < deadline:
            is_alive = driver.alive()
            for event in driver.events(0.2):
                if event.get("problems"):
                    raise PreflightError(*(f"launcher=spark: {problem}" for problem in event["problems"]))
                if event.get("ready"):
                    return
                if "executors" in event:
                    waits_for = (
                        f"executors of {self._asked['nodes'][0]} node(s), {event['executors']} of Spark are there"
                    )
            if not is_alive:
                raise PreflightError("launcher=spark: the driver of Spark ended before it had a session.")
            if now - told > TELL_SECONDS:
                told = now
                screen.complain(f"launcher=spark waits for {waits_for}; {deadline - now:.0f} s more", begin="note: ")
        raise PreflightError(
            f"launcher=spark: no executors for {self._asked['nodes'][0]} node(s) came within "
            f"{OPEN_SECONDS + self._wait:g} s. Look at the master and its log, or type launcher.wait=<longer>."
        )

    def _settings(self, plan: Plan) -> dict[str, str]:
        """One task for each executor, with the cores and GPUs of a node; Spark starts nothing again."""
        cores = plan.devices * plan.threads
        settings = {
            "spark.app.name": "dtrain",
            "spark.task.cpus": cores,
            "spark.executor.cores": cores,
            "spark.executor.instances": plan.nodes,
            "spark.cores.max": plan.nodes * cores,
            "spark.task.maxFailures": 1,
            "spark.stage.maxConsecutiveAttempts": 1,
            "spark.dynamicAllocation.enabled": "false",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
            "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": max(1, int(self._wait)),
        }
        if plan.device != "cpu":
            settings |= {"spark.task.resource.gpu.amount": plan.devices}
            settings |= {"spark.executor.resource.gpu.amount": plan.devices}
        if self._master:
            settings["spark.master"] = self._master
        return {name: _text(value) for name, value in {**settings, **self._conf}.items()}


class Driver(Protocol):
    """Runs barrier jobs, and tells their events."""

    def send(self, **job: Any) -> None: ...

    def events(self, seconds: float = 0.0) -> Sequence[Mapping[str, Any]]:
        """The events since the last call; they are awaited for `seconds`."""
        ...

    def alive(self) -> bool: ...

    def stop(self) -> None: ...


class Child:
    """A process with a JVM of its own. `asked`: its settings. `python`: the interpreter of the executors."""

    def __init__(self, asked: Mapping[str, Any], python: str) -> None:
        refuse_absent()
        _refuse_master(asked["conf"].get("spark.master", ""))
        self._events, writing = os.pipe()
        os.set_blocking(self._events, False)
        environment = {name: value for name, value in os.environ.items() if name != SECRET}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dtrain.integrations.spark", str(writing)], pass_fds=[writing],
                stdin=subprocess.PIPE, env={**environment, "PYSPARK_PYTHON": python}, start_new_session=True,
                preexec_fn=partial(process.die_with, os.getpid()),
            )  # fmt: skip
        finally:
            os.close(writing)
        self._text, self._is_ready = b"", False
        self.send(**asked)

    def send(self, **job: Any) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def events(self, seconds: float = 0.0) -> Sequence[Mapping[str, Any]]:
        if select.select([self._events], [], [], seconds)[0]:
            while data := _read(self._events):
                self._text += data
        *lines, self._text = self._text.split(b"\n")
        events = [json.loads(line) for line in lines]
        self._is_ready = self._is_ready or any(event.get("ready") for event in events)
        return events

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """A driver that is ready ends by itself, with its jobs and the JVM, which removes its files."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS if self._is_ready else 0)
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + KILL_SECONDS
            is_there = self._signal(number)
            while is_there and time.monotonic() < deadline:
                time.sleep(0.02)
                is_there = self._signal(0)
        self._process.wait()
        os.close(self._events)

    def _signal(self, number: int) -> bool:
        """Signal the driver and its JVM, or only look with 0; whether one of them is there."""
        self._process.poll()
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


class Here:
    """Jobs of the session that this process has."""

    def __init__(self, context: Any, asked: Mapping[str, Any]) -> None:
        self._queue, self._context = queue.SimpleQueue[Mapping[str, Any]](), context
        self._jobs = Jobs(context, asked["host"], asked["folder"], self._tell)

        def look() -> None:
            problems = self._jobs.look(*asked["nodes"])
            self._tell(**({"problems": problems} if problems else {"ready": True}))

        threading.Thread(target=look, daemon=True).start()

    def _tell(self, *, output: bytes = b"", to: int = 0, **event: Any) -> None:
        if to:
            write(to, output)
        else:
            self._queue.put(event)

    def send(self, **job: Any) -> None:
        self._jobs.start(**job)

    def events(self, seconds: float = 0.0) -> Sequence[Mapping[str, Any]]:
        found = []
        with contextlib.suppress(queue.Empty):
            if seconds:
                found.append(self._queue.get(timeout=seconds))
            while True:
                found.append(self._queue.get_nowait())
        return found

    def alive(self) -> bool:
        return True

    def stop(self) -> None:
        self._jobs.stop()


def refuse_absent() -> None:
    """Raises PreflightError without pyspark or Java."""
    if not importlib.util.find_spec("pyspark"):
        raise PreflightError("launcher=spark needs the pyspark package. Type: pip install 'dtrain[spark]'")
    home = os.environ.get("JAVA_HOME")
    if not shutil.which(str(Path(home, "bin", "java")) if home else "java"):
        where = f"JAVA_HOME={home}" if home else "PATH"
        raise PreflightError(
            f"launcher=spark: there is no java in {where}. Install Java 17 (apt-get install openjdk-17-jre-headless), "
            "or set JAVA_HOME."
        )


def _refuse_master(master: str) -> None:
    """Raises PreflightError if no master of Spark's own kind listens there: Spark itself would try for a minute."""
    match, reasons = MASTER.fullmatch(master), []
    for address in (match[1] + match[2]).split(",") if match else []:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            return
        except (OSError, ValueError, OverflowError) as error:
            reasons.append(f"{address}: {why(error) if isinstance(error, OSError) else error}")
    if reasons:
        raise PreflightError(
            f"launcher.master={master}: no master of Spark answers ({'; '.join(reasons)}). Start it, or type "
            "launcher.master=spark://<host>:<port>."
        )


def _session() -> Any:
    """The session of Spark that this process has; None without one."""
    if "pyspark" not in sys.modules:
        return None
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, 1 << 16)
    except BlockingIOError:
        return b""
