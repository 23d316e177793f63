"""The server's record of a node."""

from dataclasses import dataclass

from dtrain.launcher.local.link import Link


@dataclass
class Node:
    """`pid`: of an agent that this process forked. `heard`: time of its last message. `since`: when it became ready.
    `running`: it has ranks of this round. `broken`: one of its GPUs failed. `leaving`: its agent was told to go.
    """

    slot: int
    link: Link
    host: str
    pid: int | None
    heard: float
    since: float = float("inf")
    running: bool = False
    broken: bool = False
    leaving: bool = False

    @property
    def ready(self) -> bool:
        return self.since < float("inf") and not (self.running or self.broken or self.leaving)
