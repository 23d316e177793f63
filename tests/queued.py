"""A scheduler of which the queue is this host: a job is one process, which serves the run there."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from dtrain.launcher.children import Children
from dtrain.launcher.local import attached
from dtrain.planned import Plan
from dtrain.result import Result


class Queued:
    """`note`: a file that gets what a job was submitted with."""

    about: ClassVar = {"where": "elsewhere", "detached": True}

    def __init__(self, *, note: str) -> None:
        self._note, self._children = Path(note), Children()

    @property
    def inside(self) -> bool:
        return False

    def describe(self, plan: Plan) -> str:
        return f"a job of {plan.nodes} nodes"

    def launch(self, plan: Plan) -> Result:
        return attached.launch(plan, restarts=0, silence=15, wait=60, address=None, here=plan.nodes)

    def start(self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._note.write_text("\n".join([*command, *(f"{name}={value}" for name, value in environment.items())]))
        self._children.start(nodes, command, {**environment, "QUEUED_BY": str(os.getpid())})

    def alive(self) -> Collection[int]:
        return self._children.alive()

    def stop(self) -> None:
        self._children.stop()
