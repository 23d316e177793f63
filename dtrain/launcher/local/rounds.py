"""The rounds of a run: which nodes take part, when their ranks start, and whether they start again after a failure.

    gathering ── enough nodes are ready ──> running ── all ranks are done ──> over
        ^                                     │ a rank, a node or the store process failed
        └──── worth another try ──── ending <─┘ every node ends its ranks and says so ──> over

Each round has its own store, so that it never reads a key of an earlier one. A node takes part only while its link to
this process is open: when the link closes, agent and ranks are gone; when it falls silent, the agent has ended its
ranks before the server gives the node up.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dtrain.cluster import network
from dtrain.config.environment import BEGAN, LEASE, RESTART_REASON, STORE
from dtrain.errors import PreflightError
from dtrain.launcher import process
from dtrain.launcher.local import agent, alike, files
from dtrain.launcher.local.door import Door
from dtrain.launcher.local.link import Link, drain, ready
from dtrain.launcher.local.node import Node
from dtrain.launcher.local.over import exit_code, write_over
from dtrain.launcher.local.restarts import RestartLog
from dtrain.launcher.local.started import unstarted
from dtrain.lifecycle import failure, signals
from dtrain.planned import Plan
from dtrain.secrets import screen
from dtrain.storage import options, store

LAST_CALL_SECONDS = 2.0
"""A run that can go on with fewer nodes waits this long for more, and counts on a new node after this time."""
ROOT_CAUSE_SECONDS = 1.0
"""After a rank reports that it lost a peer, the wait for the report of the rank that failed first."""
NEVER = ("words", "stopped")
"""Kinds of failure that a restart cannot mend; an `error` is one too if the round made no progress."""
JOIN_SECONDS = 120.0
"""The longest silence of a node that has just joined: it loads torch."""
MARGIN_SECONDS = 1.0
"""Seconds from the end of a silent node's ranks until the server counts it as lost."""


@dataclass
class Rounds:
    """`restarts`, `silence` and `wait` as in conf/launcher/local.yaml; `here` nodes are forked, the others join at
    `address`.
    """

    plan: Plan
    scratch: Path
    log: RestartLog
    restarts: int
    silence: float
    wait: float
    address: str | None
    here: int
    stop_request: int = 0
    """The first signal that asked the run to stop; 0 for none."""
    nodes: dict[int, Node] = field(default_factory=dict)
    members: list[int] = field(default_factory=list)
    failed: dict[str, float] = field(default_factory=dict)
    """`victim` or `cause` -> when the first of them failed in this round"""

    def __post_init__(self) -> None:
        self._phase: Literal["gathering", "running", "ending"] = "gathering"
        self._passed_on = False
        """Whether the ranks were sent the stop request."""
        self._began = self._since = time.monotonic()
        self._store_pid, self._done, self._ticked = 0, set[int](), time.monotonic()
        self._pause = ""
        """Why the ranks of this round were asked to save and stop, so that the next one has other nodes."""
        self._unfit = dict[str, tuple[float, str]]()
        """Host of a node that cannot run the plan -> when it was refused, and why."""
        self._refused = 0
        """How often no store could be started."""
        self._stopped: float | None = None
        """Since when the store process has been stopped (SIGSTOP)."""
        self._fewest = min(self.plan.allowed)
        self._selector = selectors.DefaultSelector()
        self._door: Door | None = None
        self._waker = process.waker()
        self._unstarted = unstarted(self.scratch)

    def run(self) -> None:
        """Returns when the run is over, with its outcome in <scratch>/over.json."""
        for number in signals.STOP_SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOP_SIGNALS)
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker)
        if self.address:
            self._door = Door(self.address, process.memory(self.scratch), self._selector)
        for slot in range(self.here):
            self._fork_agent(slot)
        steps = {"gathering": self._gather, "running": self._run, "ending": self._decide}
        while not (self.scratch / "over.json").exists():
            self._listen()
            self._reap()
            steps[self._phase]()
        for node in self.nodes.values():
            with contextlib.suppress(ConnectionError):
                node.link.send(do="bye", exit_code=exit_code(self.scratch))
        process.kill(*[pid for pid in (self._store_pid, *(node.pid for node in self.nodes.values())) if pid])

    def _note(self, number: int, frame: object) -> None:
        self.stop_request = self.stop_request or number

    # nodes

    def _fork_agent(self, slot: int) -> None:
        ours, theirs = socket.socketpair()

        def work() -> None:
            ours.close()
            self._selector.close()
            for node in self.nodes.values():
                node.link.close()
            if self._door:
                self._door.close()
            agent.take_place(self.plan, self._here, slot, self.here)
            memory, link = process.memory(self.scratch) / f"node-{slot}", Link(theirs, "agent")
            with contextlib.suppress(ConnectionError):
                alone, where = self.here == self.plan.nodes, {"folder": self.scratch, "memory": memory}
                agent.Agent(self.plan, link, **where, lease=None, shared=True, alone=alone).run()

        with signals.blocked():
            pid = process.fork(work, f"dtrain-agent-{slot}")
        theirs.close()
        self._add(Node(slot, Link(ours, "server"), "this host", pid, time.monotonic()))

    def _add(self, node: Node) -> None:
        self.nodes[node.slot] = node
        self._selector.register(node.link, selectors.EVENT_READ, node)

    def _lose(self, slot: int, why: str) -> None:
        """Agent and ranks of a node are gone."""
        node = self.nodes.pop(slot)
        self._selector.unregister(node.link)
        node.link.close()
        if node.pid:
            process.kill(node.pid)
        if slot in self.members:
            self._lost(f"node {slot} ({node.host}) was lost: {why}")
        elif self._phase == "gathering" and node.pid:
            self.log.restarts += 1
        if slot < self.here and self.log.restarts <= self.restarts:
            self._fork_agent(slot)

    def _listen(self) -> None:
        """Read messages of nodes, until something happens or a deadline is due."""
        for source in ready(self._selector, 0.05 if self._phase != "running" or self.failed else 1.0):
            if source is self._waker:
                drain(self._waker)
            elif source is self._door:
                self._door.accept()
            elif isinstance(source, Link):
                self._welcome(source)
            elif source in self.nodes.values():
                try:
                    for message in source.link.receive():
                        self._hear(source, **message)
                except ConnectionError as error:
                    self._lose(source.slot, f"its agent ended ({error})")
        if self._door:
            self._door.dismiss_late()
        now = time.monotonic()
        late = now - self._ticked - 1.0  # this process itself was kept from running
        self._ticked = now
        for slot, node in list(self.nodes.items()):
            node.heard += max(0.0, late)
            if now - node.heard > (self.silence + MARGIN_SECONDS if node.since < float("inf") else JOIN_SECONDS):
                self._lose(slot, f"no sign of life for {self.silence:g} s")

    def _welcome(self, link: Link) -> None:
        """Read from a connection that may be a node. One that knows the secret is sent the plan and storage options."""
        host = self._door.hear(link) if self._door else None
        if host is None:
            return
        free = [slot for slot in range(self.here, self.plan.nodes) if slot not in self.nodes]
        try:
            if free:
                lease = {name: value for name, value in os.environ.items() if name.startswith(LEASE)}
                facts = {"storage": options.hand_over(), "silence": self.silence, "environment": lease}
                facts["same"] = alike.facts(self.plan)
                link.send(do="welcome", plan=self.plan.to_dict(), **facts)
                self._add(Node(free[0], link, host, None, time.monotonic()))
            else:
                link.send(do="refused", why=f"all {self.plan.nodes} nodes of the run are there")
                link.close()
        except ConnectionError:
            link.close()

    def _hear(self, node: Node, do: str, **message: Any) -> None:
        node.heard = time.monotonic()
        if do == "beat":
            node.link.send(do="heard", number=message["number"])
        elif do == "ready":
            node.since = node.heard
        elif do == "leaving":
            node.leaving = True
            self._dismiss()
        elif do == "join":
            raise ConnectionError("it joins again")
        elif do == "unfit":
            self._unfit.setdefault(node.host, (node.heard, message["why"]))
        elif message["round"] == self.log.round and node.running:
            files.unpack(message.get("files", {}), self._folder)
            if do == "failed":
                self.failed.setdefault("victim" if message["victim"] else "cause", node.heard)
            else:
                node.running = False
                self._done.add(node.slot)

    def _reap(self) -> None:
        """Reap children. A node is lost only when its link closes, which its ranks hold open too."""
        if self._store_pid and process.ended(self._store_pid) is not None:
            self._store_pid = 0
            self._lost("the store process ended")
        is_stopped = self._store_pid and process.is_stopped(self._store_pid)
        self._stopped = (self._stopped or time.monotonic()) if is_stopped else None
        if self._stopped and time.monotonic() - self._stopped > self.silence:
            self._lost(f"the store process (pid {self._store_pid}) was stopped (SIGSTOP) for {self.silence:g} s")
            process.kill(self._store_pid)
            self._store_pid = 0
        for node in self.nodes.values():
            if node.pid and process.ended(node.pid) is not None:
                node.pid = None

    def _lost(self, what: str) -> None:
        """A node or the store died."""
        if self.members:
            self.failed.setdefault("cause", time.monotonic())
            failure.report_detected(self._folder, None, "lost", what)

    # phases

    @property
    def _here(self) -> str:
        """The address at which nodes, ranks and their store meet."""
        return self._door.here if self._door else "127.0.0.1"

    @property
    def _folder(self) -> Path:
        return self.scratch / f"round-{self.log.round}"

    def _gather(self) -> None:
        slots = sorted(slot for slot, node in self.nodes.items() if node.ready)
        if any(node.since == float("inf") for node in self.nodes.values()):
            self._since = time.monotonic()  # some are just joining
        waited = time.monotonic() - self._since
        short = LAST_CALL_SECONDS if self.log.round >= 0 else self.wait
        if self.stop_request:
            self._over(None)
        elif self.log.restarts > self.restarts:
            self._over("its agents end again and again")
        elif self._unstarted.exists() and len(slots) < self._fewest:
            self._over(f"{self.log.reason or 'the run cannot begin'}; {self._unstarted.read_text('utf-8')}")
        elif len(slots) == self.plan.nodes or (len(slots) >= self._fewest and waited > short):
            self._begin(slots)
        elif (
            self._unfit
            and len(slots) < self._fewest
            and time.monotonic() - min(self._unfit.values())[0] > LAST_CALL_SECONDS
        ):
            lines = [f"{host}: {line}" for host, (_, text) in self._unfit.items() for line in text.splitlines()]
            self._over("\n".join(lines), exit_code=PreflightError.exit_code)
        elif waited > self.wait:
            missing = [str(slot) for slot in range(self.plan.nodes) if slot not in slots]
            which = f"node{'s' if len(missing) > 1 else ''} {', '.join(missing)} did not"
            self._over(
                f"{self.log.reason or 'nodes are missing'}; {len(slots)} of {self.plan.nodes} nodes came within "
                f"{self.wait:g} s, {which}"
            )

    def _begin(self, members: list[int]) -> None:
        """Begin a round: start its store, and the ranks on every member."""
        try:
            self._store_pid, port = process.fork_store(self._here)
        except ConnectionError as error:  # again in a moment
            self._refused += 1
            if self._refused > self.restarts:
                self._over(str(error))
            return
        self.log.round += 1
        self.members, self.failed, self._done, self._pause = members, {}, set(), ""
        # before the folder: a server killed between the two must not meet that folder again
        self.log.write(self.scratch)
        self._folder.mkdir()
        host = network.endpoint(self.address)[0] if self.address else self._here
        environment = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment |= {"TORCHELASTIC_RESTART_COUNT": str(self.log.round), "TORCHELASTIC_RUN_ID": self.scratch.name}
        environment[STORE] = os.urandom(16).hex()
        if self.log.reason:
            environment[RESTART_REASON] = self.log.reason
        self._phase, self._since = "running", time.monotonic()
        passed = self._since - float(os.environ.get(BEGAN, self._began))
        for group, slot in enumerate(members):
            self.nodes[slot].running = True
            place = {"first": group * self.plan.devices, "nodes": len(members), "group": group}
            self._send("start", [slot], **place, passed=passed, environment=environment)

    def _send(self, do: str, slots: Iterable[int], **message: Any) -> None:
        """Send a message about this round to nodes. A link that is lost is reported by its next read."""
        for slot in slots:
            with contextlib.suppress(ConnectionError, KeyError):
                self.nodes[slot].link.send(do=do, round=self.log.round, **message)

    def _run(self) -> None:
        if self.stop_request and not self._passed_on and not self._pause:
            self._passed_on = True
            self._ask(signal.SIGINT if self.stop_request == signal.SIGINT else signal.SIGUSR1)
        if "cause" in self.failed or time.monotonic() - self.failed.get("victim", float("inf")) > ROOT_CAUSE_SECONDS:
            self._end()
        elif self.failed:
            return
        elif self._done >= set(self.members):
            self._finished()
        elif not self._pause and not self.stop_request and (reason := self._reason_to_pause()):
            self._pause = reason
            self._ask(signal.SIGUSR1)  # the ranks save, and the next round goes on from there

    def _reason_to_pause(self) -> str:
        leaving = [f"node {slot} ({node.host}) was told to go" for slot, node in self.nodes.items() if node.leaving]
        joined = ["a node has joined"] if self._newcomers() else []
        return next(iter([*leaving, *joined]), "")

    def _dismiss(self) -> None:
        """Let the nodes go that were told to, and have no ranks any more."""
        for node in self.nodes.values():
            if node.leaving and not node.running:
                with contextlib.suppress(ConnectionError):
                    node.link.send(do="bye", exit_code=0)

    def _newcomers(self) -> list[int]:
        """Nodes outside the round that have been ready long enough to be counted on."""
        since = time.monotonic() - LAST_CALL_SECONDS
        others = ((slot, node) for slot, node in self.nodes.items() if slot not in self.members)
        return [slot for slot, node in others if not (node.broken or node.leaving) and node.since < since]

    def _ask(self, number: int) -> None:
        for slot in self.members:
            with contextlib.suppress(ConnectionError, KeyError):
                self.nodes[slot].link.send(do="stop", number=number)

    def _end(self) -> None:
        """Have every member end its ranks."""
        self._phase, self._since = "ending", time.monotonic()
        self._send("end", self.members, known="cause" if "cause" in self.failed else "victim")

    def _decide(self) -> None:
        """Once every member has ended its ranks: start again, or end the run."""
        if any(node.running for node in self.nodes.values()):
            return
        cause = failure.explain(self._folder)
        if cause.facts["kind"] == "gpu" and sum(node.ready for node in self.nodes.values()) > self._fewest:
            slot = self.members[cause.facts["rank"] // self.plan.devices]
            if slot in self.nodes:  # enough nodes are left without it
                self.nodes[slot].broken = True
        self._settle()
        kind = "victim" if cause.facts.get("victim") else cause.facts["kind"]
        if kind == "stopped" and self._pause and not self.stop_request:
            return
        further = self.log.failed(self.scratch, cause.line)
        if self.stop_request or kind in NEVER or (kind == "error" and not further) or self.log.restarts > self.restarts:
            self._over(None)
        else:
            screen.complain(f"{cause.line}; the ranks start again from the last state")

    def _settle(self) -> None:
        """Close the round: none of its ranks is alive."""
        process.kill(*[self._store_pid] if self._store_pid else [])
        self._store_pid, self.members = 0, []
        self._phase, self._since = "gathering", time.monotonic()
        self._dismiss()

    def _finished(self) -> None:
        """Every rank has finished: the run is over, unless they stopped to let a node join."""
        result = json.loads((self._folder / "result.json").read_text("utf-8"))
        self._settle()
        if self.stop_request == signal.SIGINT and result["status"] == "preempted":
            store.write(str(self._folder / "result.json"), json.dumps(result | {"status": "interrupted"}).encode())
        enough = sum(node.ready for node in self.nodes.values()) >= self._fewest
        if self._pause and enough and not self.stop_request and result["status"] == "preempted":
            self.log.reason = self._pause
        else:
            self._over(None)

    def _over(self, error: str | None, **more: Any) -> None:
        """End the run. `error`: the reason, if no rank of the last round reports it."""
        stopped_by = 0 if (self._folder / "result.json").exists() else self.stop_request
        write_over(self.scratch, {"round": self.log.round, "error": error, "stopped_by": stopped_by, **more})
