"""Who decides about rounds: which nodes are in, when their ranks start, and after a failure whether and why they start
again.

    gathering ── enough nodes are there ──> running ── all ranks are done ──> over
        ^                                     │ a rank, a node or the store process failed
        └──── worth another try ──── ending <─┘ every node ends its ranks and says so ──> over

A round has a store of its own, so that no key of a dead one is met again. A node is in a round only with a living link
to this process: when the link closes, agent and ranks are gone, and when it falls silent, the agent has ended its ranks
before it is given up.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.cluster import network
from dtrain.config.environment import BEGAN, LEASE, RESTART_REASON, STORE
from dtrain.launcher import process
from dtrain.launcher.local import agent
from dtrain.launcher.local.door import Door
from dtrain.launcher.local.link import Link, drain, ready
from dtrain.launcher.local.node import Node
from dtrain.launcher.local.restarts import RestartLog
from dtrain.lifecycle import failure, signals
from dtrain.planned import Plan
from dtrain.result import Status
from dtrain.secrets import screen
from dtrain.storage import options, store

LAST_CALL_SECONDS = 2.0
"""How long a run that can go on with fewer nodes waits for more of them, and for how long a new one must have been
there.
"""
BLAME_SECONDS = 1.0
"""A rank that lost its peer is not the cause: so long the one that is may take to be heard of."""
NEVER = ("words", "stopped")
"""Kinds of failure that are the same another time; an `error` is when no step was reached that had not been before."""
JOIN_SECONDS = 120.0
"""A node that has joined loads torch meanwhile, and says nothing."""
MARGIN_SECONDS = 1.0
"""Between the moment when a silent node has ended its ranks and the one when it is given up."""


@dataclass
class Rounds:
    """`restarts`, `silence` and `wait` as in conf/launcher/local.yaml; `here` nodes are forked, the others join at
    `address`.
    """

    plan: Plan
    scratch: Path
    book: RestartLog
    restarts: int
    silence: float
    wait: float
    address: str | None
    here: int
    wish: int = 0
    nodes: dict[int, Node] = field(default_factory=dict)
    members: list[int] = field(default_factory=list)
    failed: dict[str, float] = field(default_factory=dict)
    """`victim` or `cause` -> when the first of them failed in this round"""

    def __post_init__(self) -> None:
        self._phase: Callable[[], None] = self._gather
        self._began = self._since = time.monotonic()
        self._store_pid, self._done, self._growing, self._ticked = 0, set[int](), False, time.monotonic()
        self._refused = 0
        """How often no store could be opened."""
        self._stopped: float | None = None
        """When the store process was first seen to be stopped."""
        self._fewest = min(self.plan.allowed)
        self._selector = selectors.DefaultSelector()
        self._door: Door | None = None
        self._waker = process.waker()

    def run(self) -> None:
        """Returns when the run is over; what became of it stands in <scratch>/over.json."""
        for number in signals.WISHES:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.WISHES)
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker)
        if self.address:
            self._door = Door(self.address, process.memory(self.scratch), self._selector)
        for slot in range(self.here):
            self._fork_agent(slot)
        while not (self.scratch / "over.json").exists():
            self._listen()
            self._reap()
            self._phase()
        for node in self.nodes.values():
            with contextlib.suppress(ConnectionError):
                node.link.send(do="bye")
        process.kill(*[pid for pid in (self._store_pid, *(node.pid for node in self.nodes.values())) if pid])

    def _note(self, number: int, frame: object) -> None:
        self.wish = self.wish or number

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
            memory = process.memory(self.scratch) / f"node-{slot}"
            with contextlib.suppress(ConnectionError):
                agent.Agent(
                    self.plan, Link(theirs, "agent"), folder=self.scratch, memory=memory, lease=None, shared=True
                ).run()

        signal.pthread_sigmask(signal.SIG_BLOCK, signals.WISHES)
        pid = process.fork(work, f"dtrain-agent-{slot}")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.WISHES)
        theirs.close()
        self._add(slot, Node(Link(ours, "server"), "this host", pid, time.monotonic()))

    def _add(self, slot: int, node: Node) -> None:
        self.nodes[slot] = node
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
        elif self._phase == self._gather and node.pid:
            self.book.restarts += 1
        if slot < self.here and self.book.restarts <= self.restarts:
            self._fork_agent(slot)

    def _slot(self, node: Node) -> int:
        return next(slot for slot, each in self.nodes.items() if each is node)

    def _listen(self) -> None:
        """Read messages of nodes, until something happens or a deadline is due."""
        for source in ready(self._selector, 0.05 if self._phase != self._run or self.failed else 1.0):
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
                    self._lose(self._slot(source), f"its agent ended ({error})")
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
        """Read from a stranger. One that proves to be a node of this run is sent the plan, and what the storage is
        told.
        """
        host = self._door.hear(link) if self._door else None
        if host is None:
            return
        free = [slot for slot in range(self.here, self.plan.nodes) if slot not in self.nodes]
        try:
            if free:
                lease = {name: value for name, value in os.environ.items() if name.startswith(LEASE)}
                link.send(
                    do="welcome",
                    plan=self.plan.to_dict(),
                    storage=options.hand_over(),
                    silence=self.silence,
                    environment=lease,
                )
                self._add(free[0], Node(link, host, None, time.monotonic()))
            else:
                link.send(do="refused", why=f"all {self.plan.nodes} nodes of the run are there")
                link.close()
        except ConnectionError:
            link.close()

    def _hear(self, node: Node, do: str, **said: Any) -> None:
        node.heard = time.monotonic()
        if do == "beat":
            node.link.send(do="heard", number=said["number"])
        elif do == "ready":
            node.since = node.heard
        elif said.get("round") == self.book.round:
            agent.unpack(said.get("files", {}), self._folder)
            if do == "failed":
                self.failed.setdefault("victim" if said["victim"] else "cause", node.heard)
            else:
                node.busy = False
                self._done.add(self._slot(node))

    def _reap(self) -> None:
        """Children that ended. An agent's end is told by its link, which its ranks hold too."""
        if self._store_pid and process.ended(self._store_pid) is not None:
            self._store_pid = 0
            self._lost("the store process ended")
        self._stopped = (
            (self._stopped or time.monotonic()) if self._store_pid and process.is_stopped(self._store_pid) else None
        )
        if self._stopped and time.monotonic() - self._stopped > self.silence:
            self._lost(f"the store process (pid {self._store_pid}) was stopped (SIGSTOP) for {self.silence:g} s")
            process.kill(self._store_pid)
            self._store_pid = 0
        for node in self.nodes.values():
            if node.pid and process.ended(node.pid) is not None:
                node.pid = None

    def _lost(self, what: str) -> None:
        """Something that is no rank is gone."""
        if self.members:
            self.failed.setdefault("cause", time.monotonic())
            failure.tell(self._folder, None, "lost", what)

    # phases

    @property
    def _here(self) -> str:
        """The address at which nodes, ranks and their store meet."""
        return self._door.here if self._door else "127.0.0.1"

    @property
    def _folder(self) -> Path:
        return self.scratch / f"round-{self.book.round}"

    def _gather(self) -> None:
        there = sorted(slot for slot, node in self.nodes.items() if node.ready)
        if any(node.since == float("inf") for node in self.nodes.values()):
            self._since = time.monotonic()  # some are just joining
        waited = time.monotonic() - self._since
        short = LAST_CALL_SECONDS if self.book.round >= 0 else self.wait
        if self.wish:
            self._over(None)
        elif self.book.restarts > self.restarts:
            self._over("its agents end again and again")
        elif len(there) == self.plan.nodes or (len(there) >= self._fewest and waited > short):
            self._begin(there)
        elif waited > self.wait:
            missing = ", ".join(str(slot) for slot in range(self.plan.nodes) if slot not in there)
            self._over(
                f"{self.book.reason or 'nodes are missing'}; {len(there)} of {self.plan.nodes} node(s) are there "
                f"after {self.wait:g} s, not {missing}"
            )

    def _begin(self, members: list[int]) -> None:
        """A round: a store of its own, and ranks on every member."""
        try:
            self._store_pid, port = process.fork_store(self._here)
        except ConnectionError as error:  # again in a moment
            self._refused += 1
            if self._refused > self.restarts:
                self._over(str(error))
            return
        self.book.round += 1
        self.members, self.failed, self._done, self._growing = members, {}, set(), False
        self.book.write(
            self.scratch
        )  # before the folder: killed between the two, the next server begins a round of another name
        self._folder.mkdir()
        host = network.endpoint(self.address)[0] if self.address else self._here
        environment = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        environment |= {"TORCHELASTIC_RESTART_COUNT": str(self.book.round), "TORCHELASTIC_RUN_ID": self.scratch.name}
        environment[STORE] = os.urandom(16).hex()
        if self.book.reason:
            environment[RESTART_REASON] = self.book.reason
        self._phase, self._since = self._run, time.monotonic()
        passed = self._since - float(os.environ.get(BEGAN, self._began))
        for group, slot in enumerate(members):
            self.nodes[slot].busy = True
            first = group * self.plan.devices
            with contextlib.suppress(ConnectionError):  # told by the next look at the link
                self.nodes[slot].link.send(
                    do="start",
                    round=self.book.round,
                    first=first,
                    nodes=len(members),
                    group=group,
                    passed=passed,
                    environment=environment,
                )

    def _run(self) -> None:
        if self.wish > 0 and not self._growing:
            self._ask(signal.SIGINT if self.wish == signal.SIGINT else signal.SIGUSR1)
        if "cause" in self.failed or time.monotonic() - self.failed.get("victim", float("inf")) > BLAME_SECONDS:
            self._end()
        elif self.failed:
            return
        elif self._done >= set(self.members):
            self._finished()
        elif not self._growing and not self.wish and self._newcomers():
            self._growing = True
            self._ask(signal.SIGUSR1)  # they save, and the next round begins from there

    def _newcomers(self) -> list[int]:
        """Nodes that have been there long enough to be counted on."""
        now = time.monotonic()
        return [
            slot
            for slot, node in self.nodes.items()
            if slot not in self.members and not node.broken and now - node.since > LAST_CALL_SECONDS
        ]

    def _ask(self, number: int) -> None:
        self.wish = -abs(self.wish)  # passed on
        for slot in self.members:
            with contextlib.suppress(ConnectionError, KeyError):
                self.nodes[slot].link.send(do="stop", number=number)

    def _end(self) -> None:
        """Every member ends its ranks."""
        self._phase, self._since = self._ending, time.monotonic()
        for slot in self.members:
            with contextlib.suppress(ConnectionError, KeyError):
                self.nodes[slot].link.send(
                    do="end", round=self.book.round, known="cause" if "cause" in self.failed else "victim"
                )

    def _ending(self) -> None:
        if any(node.busy for node in self.nodes.values()):
            return
        found = failure.explain(self._folder)
        if found.facts["kind"] == "gpu" and sum(node.ready for node in self.nodes.values()) > self._fewest:
            slot = self.members[found.facts["rank"] // self.plan.devices]
            if slot in self.nodes:  # the others can do without it
                self.nodes[slot].broken = True
        self._settle()
        kind = "victim" if found.facts.get("victim") else found.facts["kind"]
        if kind == "stopped" and self._growing and not self.wish:
            return
        further = self.book.failed(self.scratch, found.line)
        if self.wish or kind in NEVER or (kind == "error" and not further) or self.book.restarts > self.restarts:
            self._over(None)
        else:
            screen.complain(f"{found.line}; the ranks start again from the last state")

    def _settle(self) -> None:
        """No rank of the round lives any more."""
        process.kill(*[self._store_pid] if self._store_pid else [])
        self._store_pid, self.members = 0, []
        self._phase, self._since = self._gather, time.monotonic()

    def _finished(self) -> None:
        """Every rank ended well: the run is over, unless it was asked to stop for a newcomer."""
        result = json.loads((self._folder / "result.json").read_text())
        self._settle()
        if self.wish and result["status"] == "preempted":
            store.write(str(self._folder / "result.json"), json.dumps(result | {"status": _status(self.wish)}).encode())
        if self._growing and not self.wish and result["status"] == "preempted":
            self.book.reason = "a node has joined"
        else:
            self._over(None)

    def _over(self, error: str | None) -> None:
        """`error` is a sentence where there is no round whose ranks could be asked."""
        asked = abs(self.wish) if not (self._folder / "result.json").exists() else 0
        write_over(self.scratch, {"round": self.book.round, "error": error, "asked": asked})


def write_over(scratch: Path, over: Mapping[str, Any]) -> None:
    store.write(str(scratch / "over.json"), json.dumps(over).encode())


def _status(wish: int) -> Status:
    return "interrupted" if abs(wish) == signal.SIGINT else "preempted"
