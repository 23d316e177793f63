"""The agent of a node: it forks the ranks when the server asks, watches them, and ends them on request or when it has
lost the server.

The server forks the agents of its own host. On another host, in the same folder:

    python -m dtrain.launcher.local.agent <host>:<port> [seconds to wait for it] [-]

Both need the same DTRAIN_SECRET in their environment, which never crosses the network; on one host it is not needed.
With `-` further variables are read from standard input: a line of JSON.
"""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dtrain import cluster, secrets
from dtrain.cluster import network
from dtrain.config.environment import BEGAN, COLD, MEMORY, REPORTS, SECRET
from dtrain.errors import EXIT_CODES, PreflightError, StoreError, why
from dtrain.launcher import preflight, process
from dtrain.launcher.local import alike, files
from dtrain.launcher.local.door import GREET_SECONDS, knock
from dtrain.launcher.local.link import Link, drain, ready
from dtrain.launcher.rank import run_rank
from dtrain.launcher.warm import UnforkableError, load, warm
from dtrain.lifecycle import failure, kernel_log, signals
from dtrain.lifecycle.root_cause import is_victim
from dtrain.planned import Plan
from dtrain.secrets import screen
from dtrain.storage import options, store

REPORT_SECONDS = {"victim": 5.0, "cause": 1.0}
"""Time for ranks to report their stacks before they are ended: less if the rank that failed first is known. A rank that
does not answer is reported as stuck in native code.
"""
BEAT_SECONDS = 1.0
LOOK_SECONDS = 0.25
"""Seconds between two checks of the ranks' reports: a rank that has failed may hang on its way out."""
FROZEN_SECONDS = 3.0
"""How long a rank that was asked to stop may be stopped itself (SIGSTOP)."""


class Agent:
    """`lease`: seconds without an answer of the server after which the ranks are ended; None on the server's own host,
    where its end closes the link.

    `shared`: the server reads the folder of reports itself; else its files are sent. `alone`: no node is elsewhere.
    """

    def __init__(
        self, plan: Plan, link: Link, *, folder: Path, memory: Path, lease: float | None, shared: bool, alone: bool
    ) -> None:
        self._plan, self._link, self._lease = plan, link, lease
        self._folder, self._memory, self._shared, self._alone = folder, memory, shared, alone
        self._ranks: dict[int, int] = {}
        """pid -> rank, of those that are running"""
        self._round, self._first, self._reports = -1, 0, folder
        self._log = kernel_log.KernelLog()
        self._failed = set[int]()
        """Ranks of this round that have reported an error"""
        self._beat_number, self._beats = 0, dict[int, float]()
        self._beat_at = self._alive = time.monotonic()
        self._over = False
        self.exit_code = 0
        """That of the run, once it is over."""
        self.leaving = 0
        """The signal by which this agent was told to go; 0 for none."""
        self._has_told = False
        self._asked, self._frozen = False, dict[int, float]()
        """Whether ranks were asked to stop, and pid -> since when a rank is stopped (SIGSTOP) and cannot."""
        self._handlers: Mapping[str, Callable[..., None]] = {
            "heard": self._heard, "start": self._start, "stop": self._stop, "end": self._end, "bye": self._bye
        }  # fmt: skip

    def run(self) -> None:
        """Returns when the run is over. Raises ConnectionError, with no rank alive, when the server is lost."""
        shutil.rmtree(self._memory, ignore_errors=True)  # a node that died has lost its memory
        self._memory.mkdir(parents=True)
        waker = process.waker()
        before = {} if self._shared else {number: signal.signal(number, self._leave) for number in signals.STOP_SIGNALS}
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(waker, selectors.EVENT_READ, None)
                selector.register(self._link, selectors.EVENT_READ, self._link)
                self._link.send(do="ready")
                while not self._over:
                    self._beat()
                    for link in ready(selector, LOOK_SECONDS):
                        for message in link.receive() if link else []:
                            self._handle(**message)
                    drain(waker)
                    self._reap()
                    self._read_reports()
                    self._check_frozen()
        finally:
            process.kill(*self._ranks)
            self._log.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _leave(self, number: int, _: object) -> None:
        """The server has the ranks of all nodes save before it lets this one go. A repeated signal ends it at once."""
        if signals.note(number):
            raise KeyboardInterrupt
        self.leaving = number

    def _handle(self, do: str, **message: Any) -> None:
        if do not in self._handlers:
            raise ConnectionError(f"the server sends {do} to a node that it has taken already")
        self._handlers[do](**message)

    def _beat(self) -> None:
        now = time.monotonic()
        if self.leaving and not self._has_told:
            self._has_told = True
            self._link.send(do="leaving")
        if self._lease is not None and now - self._alive > self._lease:
            raise ConnectionError(f"the server has not answered for {self._lease:g} s")
        if now >= self._beat_at:
            self._beat_number, self._beat_at = self._beat_number + 1, now + BEAT_SECONDS
            self._beats[self._beat_number] = now
            self._link.send(do="beat", number=self._beat_number)

    # messages of the server

    def _heard(self, number: int) -> None:
        """The server has received that beat, and does not give this node up before the lease from then on ends."""
        self._alive = self._beats[number]
        self._beats = {later: at for later, at in self._beats.items() if later > number}

    def _start(
        self, *, round: int, first: int, nodes: int, group: int, passed: float, environment: Mapping[str, str]
    ) -> None:
        """`passed`: seconds since the command began."""
        self._round, self._first, self._reports, self._asked = round, first, self._folder / f"round-{round}", False
        self._log.close()
        self._log = kernel_log.KernelLog()
        self._failed.clear()
        self._reports.mkdir(exist_ok=True)
        plan = self._plan.on(nodes)
        shared = {
            **environment,
            "WORLD_SIZE": str(plan.world),
            "LOCAL_WORLD_SIZE": str(plan.devices),
            "GROUP_RANK": str(group),
            "GROUP_WORLD_SIZE": str(nodes),
            REPORTS: str(self._reports),
            MEMORY: str(self._memory),
            BEGAN: str(time.monotonic() - passed),  # a clock of this host
        }
        for local in range(plan.devices):
            rank = first + local
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)}
            work = partial(_rank, plan, self._reports, self._link, own, is_alone=self._alone)
            try:
                with signals.blocked():  # until the rank has its handlers
                    self._ranks[process.fork(work, f"dtrain-rank-{rank}")] = rank
            except OSError as error:
                sentence = f"rank {rank} cannot start: {why(error)}"
                failure.report_detected(self._reports, rank, "error", sentence, exit_code=PreflightError.exit_code)
                self._send_failed(victim=False)
                break

    def _send_failed(self, *, victim: bool) -> None:
        self._link.send(do="failed", round=self._round, victim=victim)

    def _send_end(self, do: str, round: int) -> None:
        """Send the files of the reports too, unless the server reads them itself."""
        self._link.send(do=do, round=round, files={} if self._shared else files.pack(self._reports))

    def _stop(self, *, number: int) -> None:
        """Ranks ignore SIGINT where what started this node does."""
        self._asked = True
        signals.note_passed_on(self._reports)
        for pid in self._ranks:
            os.kill(pid, number if number in signals.STOP_SIGNALS else signal.SIGUSR1)

    def _end(self, *, round: int, known: str) -> None:
        """Have living ranks report, end them, and answer the server."""
        if round == self._round:
            self._report(REPORT_SECONDS[known])
            with contextlib.suppress(StoreError):
                failure.log_xids(self._reports, self._first, self._log)  # before the driver logs the kills below
            process.kill(*self._ranks)
            self._ranks.clear()
        self._send_end("ended", round)

    def _bye(self, *, exit_code: int) -> None:
        self._over, self.exit_code = True, exit_code

    # its ranks

    def _reap(self) -> None:
        for pid, rank in list(self._ranks.items()):
            code = process.ended(pid)
            if code is not None:
                del self._ranks[pid]
                if not failure.is_done(self._reports, rank):
                    with contextlib.suppress(StoreError):  # the rank has reported a full disk
                        failure.report_exit(self._reports, rank, code, self._log)
                    self._send_failed(victim=failure.ended_by_others(self._reports, rank, code))
                elif not self._ranks:
                    self._send_end("done", self._round)

    def _read_reports(self) -> None:
        """A rank that has reported an error has failed, even while it still runs."""
        for rank in sorted(set(self._ranks.values()) - self._failed):
            reports = failure.failures(self._reports, rank)
            if reports and reports[0]["kind"] != "stopped":
                self._failed.add(rank)
                self._send_failed(victim=is_victim(reports[0]))

    def _check_frozen(self) -> None:
        """A rank that is stopped (SIGSTOP) and cannot obey the stop request keeps the others waiting in a collective:
        the round fails after FROZEN_SECONDS.
        """
        stopped = [pid for pid in self._ranks if process.is_stopped(pid)] if self._asked else []
        self._frozen = {pid: self._frozen.get(pid, time.monotonic()) for pid in stopped}
        for pid in [pid for pid, since in self._frozen.items() if time.monotonic() - since > FROZEN_SECONDS]:
            with contextlib.suppress(StoreError):
                failure.report_unresponsive(self._reports, self._ranks[pid], pid)
            self._asked = False
            self._send_failed(victim=False)

    def _report(self, seconds: float) -> None:
        """Ask each rank for its stacks (SIGUSR2), and wait until it has written them or ended."""
        for pid in self._ranks:
            os.kill(pid, signals.REPORT)
        silent, deadline = dict(self._ranks), time.monotonic() + seconds
        while silent and time.monotonic() < deadline:
            time.sleep(0.002)
            for pid, rank in list(silent.items()):
                if (self._reports / f"report-{rank}.json").exists():
                    del silent[pid]
                elif process.ended(pid) is not None:
                    del silent[pid], self._ranks[pid]
        for pid, rank in silent.items():
            failure.report_unresponsive(self._reports, rank, pid)


def _rank(plan: Plan, folder: Path, link: Link, environment: Mapping[str, str], *, is_alone: bool) -> None:
    """One rank, in its own process. It keeps the link open, so that the server does not see the node end while one of
    its ranks is alive. Lines of other ranks than 0 bear their number, unless all are on this host.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signals.REPORT, signal.SIG_IGN)  # until the watchdog takes it
    signals.listen(forwarded=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)
    os.environ.update(environment)
    rank = int(environment["RANK"])
    if rank and not is_alone:
        screen.label(f"[rank {rank}] ")
    failure.mark_started(folder, rank)
    try:
        result = run_rank(plan, forked=True)
    except BaseException as error:  # torch has exceptions that do not derive from Exception
        try:
            failure.report_exception(folder, rank, error)
        except StoreError:  # the folder for temporary files is full or gone
            screen.complain(failure.describe(failure.facts_of(error, rank), []).paragraph)
        sys.exit(1)
    if rank == 0:
        store.write(str(folder / "result.json"), json.dumps(result.to_dict()).encode())
    failure.mark_done(folder, rank)


def take_place(plan: Plan, address: str, slot: int, here: int) -> None:
    """Set up node `slot` of the `here` nodes of this host: the interface to `address`, and its share of the GPUs."""
    network.take_interface(address)
    if here > 1 and plan.device != "cpu":
        os.environ.update(cluster.share(os.environ, slot, plan.devices))


# on another host


@store.anchored()
def join(address: str, wait: float, cold: str = "") -> int:
    """Serve as a node of the run at `address`, and look for its server again when it is lost. Returns the exit code of
    the run, or 75 if this node was told to go before the run was over.

    Raises TimeoutError when no server accepts this node within `wait` seconds, PreflightError for an address that
    cannot be joined, and UnforkableError.
    """
    refuse(address)
    plan, agent = None, None
    try:
        folder = store.scratch("agent")
        process.claim(folder)
    except OSError as error:
        raise PreflightError(f"there is no room for the files of this node: {why(error)}. Free some.") from error
    since = time.monotonic()
    try:
        while True:
            try:
                with contextlib.closing(knock(address)) as link:
                    welcome = greet(link)
                    if plan is None or welcome["plan"] != plan.to_dict():
                        plan = _fitting(welcome, link)
                        warm(plan, cold)
                    options.take_over(welcome["storage"])
                    os.environ.update(welcome["environment"])
                    network.take_interface(link.here)
                    lease, memory = welcome["silence"], process.memory(folder) / "node"
                    since = float("inf")
                    agent = Agent(plan, link, folder=folder, memory=memory, lease=lease, shared=False, alone=False)
                    agent.run()
                    return EXIT_CODES["preempted"] if agent.leaving else agent.exit_code
            except ConnectionError as error:
                if agent and agent.leaving:
                    return EXIT_CODES["preempted"]
                load()  # while the server does the same
                if since == float("inf"):
                    screen.complain(f"{error}; the ranks of this node have ended, looking for the server again")
                since = min(since, time.monotonic())
                if time.monotonic() - since > wait:
                    raise TimeoutError(f"no run at {address} took this node within {wait:g} s: {error}") from error
                time.sleep(0.5)
    finally:
        process.remove(folder)


def _fitting(welcome: Mapping[str, Any], link: Link) -> Plan:
    """The plan, if this node is like the server's host and can run it. Otherwise the server is told why, and
    PreflightError is raised.
    """
    problems = [*alike.of_host(welcome["same"])]
    if not problems:
        plan = Plan.from_dict(welcome["plan"])
        options.take_over(welcome["storage"])
        problems = [*alike.of_plan(welcome["same"], plan), *preflight.on_node(plan)]
    if problems:
        link.send(do="unfit", why="\n".join(problems))
        raise PreflightError(*problems)
    return plan


def refuse(address: str) -> None:
    """Raises PreflightError for a malformed address, or one that cannot be joined without a secret."""
    try:
        host, _ = network.endpoint(address)
    except ValueError as error:
        raise PreflightError(f"{error}.") from error
    if weakness := network.weakness(host, os.environ):
        raise PreflightError(weakness)


def greet(link: Link) -> dict[str, Any]:
    """The server's welcome, after both sides have proved that they know the secret. Raises ConnectionError."""
    deadline, asked = time.monotonic() + GREET_SECONDS, False
    try:
        while time.monotonic() < deadline:
            for message in link.receive():
                if message.pop("do") == "welcome":
                    return message
                raise ConnectionError(message.get("why", "the server does not take this node"))
            if link.has_begun and not asked:
                link.send(do="join", host=socket.gethostname())
                asked = True
        raise ConnectionError(f"no answer within {GREET_SECONDS:g} s")
    except ConnectionError as error:
        if link.proved:
            raise
        raise ConnectionError(
            f"who listens there has not proved that it knows this {SECRET} ({error}): set the same one on both"
        ) from error


if __name__ == "__main__":
    screen.outlive_readers()
    secrets.guard()
    cold = os.environ.pop(COLD, "")
    is_of_ssh = sys.argv[-1] == "-"
    if is_of_ssh:
        process.die_with(os.getppid())  # whose end is that of the connection to the command
        os.environ.update(json.loads(sys.stdin.readline()))
        sys.argv.pop()
    try:
        sys.exit(join(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 60.0, cold))
    except UnforkableError as error:
        error.begin_again(["dtrain.launcher.local.agent", *sys.argv[1:]], cold=cold)
    except KeyboardInterrupt:
        sys.exit(130)
    except PreflightError as error:
        if not is_of_ssh:  # there the command tells it
            screen.complain(str(error))
        sys.exit(error.exit_code)
    except TimeoutError as error:
        sys.exit(f"dtrain: {error}")
