"""The agents that an engine starts for a run which this command serves: all at first, later those that have ended."""

import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.config.environment import SECRET
from dtrain.launcher import Engine
from dtrain.launcher.local.restarts import RestartLog
from dtrain.planned import Plan

LEAVE_SECONDS = 10.0
"""Time for the agents to end by themselves after the run."""


class StartedAgents:
    """In its context the run's secret is in the environment: the user's, or a new one. At its end no agent is left."""

    def __init__(self, engine: Engine, plan: Plan, scratch: Path, request: Mapping[str, Any]) -> None:
        self._engine, self._scratch, self._restarts = engine, scratch, request["restarts"]
        self._nodes = range(request["here"], plan.nodes)
        self._fewest = min(plan.allowed) - request["here"]
        self._command = agent_command(request["address"], request["wait"])
        self._round, self._starts = -1, Counter[int]()
        """How often each node was started in this round."""

    def __enter__(self) -> "StartedAgents":
        self._made = not os.environ.get(SECRET)
        if self._made:
            os.environ[SECRET] = secrets.token_hex(16)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            deadline = time.monotonic() + LEAVE_SECONDS
            while kind is None and self._is_over() and self._engine.alive() and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            self._engine.stop()
            if self._made:
                os.environ.pop(SECRET, None)

    def tend(self) -> None:
        """Start the agents that are not alive, each at most `restarts` times more within a round. If so many have ended
        for good that the run cannot begin, the server reads the reason in <scratch>/unstarted.
        """
        if self._is_over():
            return
        number = RestartLog.read(self._scratch).round
        if number != self._round:
            self._round, self._starts = number, Counter()
        alive = self._engine.alive()
        ended = [node for node in self._nodes if node not in alive]
        again = [node for node in ended if self._starts[node] <= self._restarts]
        if again:
            self._starts.update(again)
            self._engine.start(again, self._command, {SECRET: os.environ[SECRET]})
        elif len(self._nodes) - len(ended) < self._fewest:
            times, which = 1 + self._restarts, ", ".join(map(str, ended))
            unstarted(self._scratch).write_text(
                f"the agent of node(s) {which} was started {times} times and ended", "utf-8"
            )

    def _is_over(self) -> bool:
        return (self._scratch / "over.json").exists()


def unstarted(scratch: Path) -> Path:
    return scratch / "unstarted"


def agent_command(address: str, wait: float) -> list[str]:
    """The command of a node's agent, which joins the run at `address`."""
    return [sys.executable, "-m", "dtrain.launcher.local.agent", address, f"{wait:g}"]
