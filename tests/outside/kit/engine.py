"""An engine whose nodes are processes of this host."""

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

from dtrain.launcher.children import Children
from dtrain.launcher.local import attached
from dtrain.planned import Plan
from dtrain.result import Result


class Processes:
    about: ClassVar = {"where": "elsewhere"}

    def __init__(
        self, *, restarts: int, silence: float, wait: float, address: str | None, python: str | None = None
    ) -> None:
        self._serving = {"restarts": restarts, "silence": silence, "wait": wait, "address": address}
        self._python, self._children = python, Children()

    def describe(self, plan: Plan) -> str:
        return f"{plan.nodes} x python -m dtrain.launcher.local.agent <host>:<port>"

    def launch(self, plan: Plan) -> Result:
        return attached.launch(plan, engine=self, **self._serving)

    def prepare(self, plan: Plan) -> None:
        pass

    def start(self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        for node in nodes:
            self._children.start([node], [self._python or command[0], *command[1:]], environment)

    def alive(self) -> Collection[int]:
        return self._children.alive()

    def stop(self) -> None:
        self._children.stop()
