"""One agent for each node, on this host or on others that join; ranks are forked from a process that has loaded torch.

    the command (no torch) ── zygote (loads torch) ── server ─┬─ store process: the rendezvous store of one round
                                                              ├─ agent of node 0 ── ranks
                                                              └─ agent of node 1 ── ranks

Where there is no zygote (dtrain/launcher/zygote.py), the server is a new interpreter and loads torch itself. Agents of
other hosts are started by hand, or by an engine (dtrain/launcher/__init__.py).

Each process dies with the one that forked it, so a kill leaves nothing behind. Unless the command itself is killed, the
ranks start again from the last state: the server replaces agents and the store process, the command replaces the
server. Ranks write their result or traceback to a folder of their round; the command shows the first traceback, which
is the root cause, and not those of the ranks that lost their peer.
"""

import sys
from dataclasses import dataclass

from dtrain.config import environment
from dtrain.planned import Plan
from dtrain.result import Result


@dataclass(frozen=True)
class Local:
    """The arguments are explained in conf/launcher/local.yaml."""

    restarts: int
    silence: float
    wait: float
    address: str | None
    here: int | None

    def describe(self, plan: Plan) -> str:
        here = self._here(plan)
        server = f"{sys.executable} -m dtrain.launcher.local.server"
        agents = f"{here} agent(s) x {plan.devices} rank(s) on this host"
        if here < plan.nodes:
            other = f"python -m dtrain.launcher.local.agent {self.address}, with the same {environment.SECRET}"
            agents += f", {plan.nodes - here} elsewhere: {other}"
        return f"{server}: {agents}"

    def launch(self, plan: Plan) -> Result:
        from dtrain.launcher.local import attached  # processes and signals, which a plan shows and does not start

        return attached.launch(plan, **{**vars(self), "here": self._here(plan)})

    def _here(self, plan: Plan) -> int:
        return plan.nodes if self.here is None else self.here
