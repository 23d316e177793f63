"""A run of `train` on an accelerator that is pretended: what it costs a GPU that the host waits for it, told by the lines that do.

for rank in rehearse("model=gpt", "strategy=fsdp", "devices=2"):
    rank.loss, rank.each_step, rank.notes
"""

import atexit
import importlib
import inspect
import os
import pickle
import subprocess
import sys
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

from pool import RankFailed, prepare, ranks
from pretended import NAME, Note, registered, rehearsed
from small import plan

from dtrain.backend import process_group
from dtrain.data import stream
from dtrain.lifecycle.watchdog import Watchdog
from dtrain.loop import spike
from dtrain.planned import Plan
from dtrain.train import train

LAG = 2
"""Steps, instead of eight, after which the host learns of a spike: a step is slow on a device that is written in Python."""
STEPS = LAG + 5
FEW = ("data=synthetic", "batch=8", "log.every=1000", "checkpoint.every=1000", f"steps={STEPS}")
"""Nothing is due in the middle."""


@dataclass(frozen=True)
class Gloo:
    """Carries what lies on the device too."""

    timeout: float

    def open(self) -> AbstractContextManager[None]:
        registered()
        return process_group(f"cpu:gloo,{NAME}:gloo", timeout=self.timeout)


@dataclass(frozen=True)
class Rehearsed:
    """Of one rank: its last step and the loss of it, the notes of all steps, and the threads that have chosen its device."""

    step: int
    loss: float | None
    notes: list[Note]
    chosen_in: set[str]

    @property
    def each_step(self) -> dict[str, float]:
        """Line without its number -> how often the host waited there in a step in which nothing is due."""
        steady = range(STEPS - 3, STEPS - 1)
        found = Counter(note.where for note in self.notes if note.kind == "waits" and note.step in steady)
        return {where: count / len(steady) for where, count in found.items()}

    @property
    def homeless(self) -> set[str]:
        """Lines that made tensors without a device."""
        return {note.where for note in self.notes if note.kind == "homeless"}


def rehearse(*words: str, fault: "Fault | None" = None, out: Path | None = None) -> list[Rehearsed]:
    """One for each rank. Raises RankFailed, with the line, where tensors of two devices meet."""
    with TemporaryDirectory() as folder:
        made = plan(*FEW, f"out={out or folder}", *words)
        return _ask(replace(made, device=NAME, backend={**made.backend, "_target_": "rehearsal.Gloo"}), fault)


def _ask(made: Plan, fault: "Fault | None") -> list[Rehearsed]:
    process = _clean()
    assert process.stdin and process.stdout
    pickle.dump((made, fault), process.stdin)
    process.stdin.flush()
    found, error = pickle.load(process.stdout)
    if error:
        raise RankFailed(error)
    return list(found)


@cache
def _clean() -> "subprocess.Popen[bytes]":
    """A process that goes through no backward itself, and forks the ranks: torch counts the devices in the first one, and a fork does not count again."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.communicate)  # which ends it
    return process


def serve() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ranks print
    prepare()
    while True:
        try:
            made, fault = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: tuple[Any, str] = ranks(made.world, _rank, made, fault), ""
        except RankFailed as failed:
            answer = None, str(failed)
        pickle.dump(answer, answers)
        answers.flush()


def _rank(made: Plan, fault: "Fault | None") -> Rehearsed:
    if fault:
        plant(fault)
    with rehearsed() as device:
        beat = Watchdog.begin_step

        def counted(self: Watchdog, step: int, seen: int) -> None:
            device.step = step
            beat(self, step, seen)

        with (
            patch.object(Watchdog, "begin_step", counted),
            patch.object(stream, "BLOCK_STEPS", 2),
            patch.object(spike, "LAG", LAG),
        ):
            result = train(made)
            return Rehearsed(result.step, result.loss, device.notes, device.chosen_in)


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in a module of dtrain, becomes `new`."""

    module: str
    old: str
    new: str


def plant(fault: Fault) -> None:
    """In this process, where others may hold the functions of the module already: they get the code of their new selves."""
    module = importlib.import_module(f"dtrain.{fault.module}")
    source = Path(str(module.__file__)).read_text()
    assert source.count(fault.old) == 1, fault
    changed = ModuleType(module.__name__)
    changed.__dict__.update(__file__=module.__file__, __package__=module.__package__)
    sys.modules[changed.__name__] = changed  # where dataclasses look themselves up
    try:
        exec(compile(source.replace(fault.old, fault.new), str(module.__file__), "exec"), changed.__dict__)
    finally:
        sys.modules[changed.__name__] = module
    _take_over(module, changed)


def _take_over(old: Any, new: Any) -> None:
    for name, value in vars(new).items():
        mine = vars(old).get(name)
        value, mine = (getattr(each, "__func__", each) for each in (value, mine))
        if isinstance(value, FunctionType) and isinstance(mine, FunctionType):
            mine = inspect.unwrap(mine)
            mine.__code__ = inspect.unwrap(value).__code__
        elif (
            isinstance(value, type)
            and value.__module__ == new.__dict__.get("__name__", getattr(new, "__module__", ""))
            and isinstance(mine, type)
        ):
            _take_over(mine, value)


if __name__ == "__main__":
    from rehearsal import serve as begin  # under the name by which answers are known

    begin()
