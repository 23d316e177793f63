"""A node of a run, as the server knows it."""

from dataclasses import dataclass

from dtrain.launcher.local.link import Link


@dataclass
class Node:
    """`pid` of an agent that this process forked. `busy` until it has ended the ranks of its round. `broken`: a GPU of
    it is.
    """

    link: Link
    host: str
    pid: int | None
    heard: float
    since: float = float("inf")
    busy: bool = False
    broken: bool = False

    @property
    def ready(self) -> bool:
        return self.since < float("inf") and not self.busy and not self.broken
