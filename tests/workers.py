"""Tests run in forked workers: a process for each file, a few at a time, from one that has imported all files and run none.

What a file's tests leave in memory ends with its process, so forking ranks from it stays cheap, and no test can lean on another file's.

pytest-timeout fails a test that is over its limit. Where it cannot, as in C++ code that never returns, the worker is made to print its stacks and to end;
the next tests of the file run in another one.
"""

import math
import os
import signal
import time
from collections import deque
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

import pytest
from _pytest.config import create_terminal_writer

from dtrain.launcher.process import ended, fork, kill

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
LONGEST = (
    "lifecycle/test_loaders.py", "test_rehearsal.py", "test_api.py", "faults/test_crash_points.py", "predict/test_memory.py", "faults/test_nccl.py",
    "predict/test_collectives.py", "verb/test_evaluate.py", "compile/test_blocks.py", "invariance/test_layouts.py", "checkpoint/test_sharded.py",
    "launcher/test_warm.py", "test_package.py", "lifecycle/test_slowdown.py", "data/test_collate.py", "loop/test_agreement.py", "loop/test_spike.py",
    "sweep/test_engine.py", "launcher/test_slurm.py", "integrations/mpi/test_backend.py", "faults/test_kills.py", "sweep/test_crew.py", "integrations/ray/test_data.py",
    "launcher/test_ssh.py", "faults/test_sweep_kills.py", "integrations/kubernetes/test_launcher.py", "integrations/spark/test_frames.py", "house/test_readme.py", "integrations/mpi/test_launcher.py",
    "verb/test_tokenize.py", "launcher/test_external.py", "sweep/test_weights.py", "integrations/spark/test_launcher.py", "sweep/test_foreign.py", "integrations/ray/test_launcher.py",
    "faults/test_sweep_points.py", "test_submissions.py",
)  # fmt: skip
"""Files that begin first, in this order, so that no worker ends long after the others, and clusters of several engines do not start at once."""
END_SECONDS = 30.0
"""Given to the fixtures of a worker that is to end, and to a test that pytest-timeout has failed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "processes that run test files, two more than cores as many tests wait; 0: this process"
    parser.addoption("--workers", type=int, default=CORES + 2, help=text)
    parser.addoption(
        "--failed", type=Path, help="a file for the names of tests that fail, one a line: run them again with @<file>"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.failed:
        bad = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.getreports(kind)]
        config.option.failed.write_text("".join(f"{name}\n" for name in dict.fromkeys(bad)))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the files in workers and report what they report. None, and pytest runs the tests itself, where it has to be this process."""
    option = session.config.option
    if (
        not option.workers
        or option.usepdb
        or option.collectonly
        or (session.testsfailed and not option.continue_on_collection_errors)
    ):
        return None
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # one folder for all workers
    files: dict[Any, list[pytest.Item]] = {}
    for item in session.items:
        files.setdefault(item.path, []).append(item)
    waiting = deque(sorted(files.values(), key=lambda items: _place(items[0].path)))
    running: dict[Connection, _Worker] = {}
    try:
        while waiting or running:
            while waiting and len(running) < option.workers:
                worker = _Worker(session, waiting.popleft())
                running[worker.reports] = worker
            wait(running, timeout=1)
            for worker in list(running.values()):
                if not worker.relay():
                    del running[worker.reports]
                    if worker.items:
                        waiting.appendleft(worker.items)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
    finally:
        _end([worker.pid for worker in running.values()])
    return True


def _place(path: Path) -> int:
    """Of a file in the order in which files begin."""
    return next((place for place, name in enumerate(LONGEST) if str(path).endswith(name)), len(LONGEST))


def _end(pids: list[int]) -> None:
    """End workers: they have a while to end the servers and daemons of their fixtures."""
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + END_SECONDS
    while (pids := [pid for pid in pids if ended(pid) is None]) and time.monotonic() < deadline:
        time.sleep(0.05)
    kill(*pids)


class _Worker:
    """The process that runs `items`, of which those stay that it has not finished."""

    def __init__(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        self.config, self.items = session.config, items
        self.reports, reporting = Pipe(duplex=False)
        self.pid = fork(lambda: _work(session, items, reporting), "dtrain-tests")
        reporting.close()
        self.deadline = math.inf

    def relay(self) -> bool:
        """Pass on what it has reported so far. False when it has ended."""
        code = ended(self.pid)  # asked first: what it wrote before its end is there
        while self.reports.poll():
            try:
                hook, arguments = self.reports.recv()
            except EOFError:
                break
            if hook == "pytest_runtest_logreport":
                arguments["report"] = self.config.hook.pytest_report_from_serializable(
                    config=self.config, data=arguments["report"]
                )
            getattr(self.config.hook, hook)(**arguments)
            if hook == "pytest_runtest_logstart":
                self.deadline = time.monotonic() + _limit(self.items[0]) + END_SECONDS
            if hook == "pytest_runtest_logfinish":
                self.deadline = math.inf
                del self.items[0]
        if code is None:
            if time.monotonic() > self.deadline:
                self.deadline = math.inf
                os.kill(self.pid, signal.SIGABRT)  # pytest has it print the stacks of all threads
            return True
        self.reports.close()
        if self.items:
            self._blame(self.items.pop(0), code)
        return False

    def _blame(self, item: pytest.Item, code: int) -> None:
        sentence = f"the worker of {item.path.name} ended with {code} in this test"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", sentence, "call")
        self.config.hook.pytest_runtest_logreport(report=report)
        self.config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


class _Reporter:
    """The plugin of a worker in the place of pytest's terminal: all hooks about results go to the process that forked it.

    pytest-timeout writes stacks to `_tw`, the screen.
    """

    def __init__(self, config: pytest.Config, reports: Connection, screen: TextIO) -> None:
        self.config, self.reports, self._tw = config, reports, create_terminal_writer(config, screen)

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.reports.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.reports.send(("pytest_runtest_logreport", {"report": data}))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.reports.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))


def _work(session: pytest.Session, items: list[pytest.Item], reports: Connection) -> None:
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are the parent's, and the other workers' too
    screen = os.fdopen(os.dup(2), "w", buffering=1)
    plugins.register(_Reporter(session.config, reports, screen), "terminalreporter")
    capture.start_global_capturing()
    with suppress(KeyboardInterrupt):  # whoever typed it is heard by the process that forked this one
        for item, following in zip(items, [*items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    with suppress(BaseException):  # after an interrupt, fixtures are still there
        session._setupstate.teardown_exact(None)


def _limit(item: pytest.Item) -> float:
    """Seconds after which pytest-timeout fails a test."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark else os.environ.get("PYTEST_TIMEOUT") or item.config.getini("timeout"))
