"""A logger of lines, and a hook that counts its calls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dtrain.logger import Facts, Logger


class Lines(Logger):
    def __init__(self, out: str, steps: int, name: str) -> None:
        self.path = Path(out) / name

    def begin(self, facts: Facts) -> None:
        self.write(f"{facts.name} {facts.settings['optim.lr']}")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.write(f"{step} {values.get('loss')}")

    def end(self, result: Mapping[str, Any]) -> None:
        self.write(f"{result['status']} after {result['step']}")

    def write(self, line: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{line}\n")


class Pulse:
    about: ClassVar = {"figures": {"eval_pulse": "highest"}}

    def __init__(self, every: int) -> None:
        self.every, self.calls = every, 0

    def __call__(self, info: Any) -> dict[str, Any]:
        self.calls += 1
        return {"pulse": self.calls}
