"""A save that ends at any operation on the storage, with and without a power cut: the next start finds the old state or the new one, bit by bit."""

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from small import on_mesh, small_gpt

from dtrain.checkpoint import snapshot
from dtrain.checkpoint.sharded import Sharded
from dtrain.checkpoint.state import TrainState
from dtrain.errors import StoreError
from dtrain.mesh import Mesh
from dtrain.storage import patience, store
from dtrain.testing import faults, flaky

PACK = snapshot.pack
Bits = dict[str, bytes]
Power = tuple[str, int | None]

POWER: list[Power] = [("stays", None), ("is cut", None), ("is cut", 1), ("is cut", 2)]
"""And of what was not synced: nothing is left, or a part that follows from a seed."""


def state_at(step: int) -> TrainState:
    """Step 0 is no state that was ever saved."""
    model = small_gpt(layers=1)
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.01), None, None)
    for number in range(max(1, step)):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() + number
        state.optimizer.step()
    state.step = step
    return state


def bits(state: TrainState) -> Bits:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in state.tensors().items()} | {
        "step": str(state.step).encode()
    }


def save(mesh: Mesh, out: str, state: TrainState, keep: int = 1) -> None:
    """As a run does that was started. It keeps one checkpoint, so the one before it goes."""
    checkpoint = Sharded(out=out, mesh=mesh, resume="auto", every=1, keep=keep)
    checkpoint.save(state)
    checkpoint.wait()


def found(mesh: Mesh, out: str) -> Bits | None:
    """What the next start finds; None when it begins anew. In several files, of which a part may be there."""
    state = state_at(0)
    for tensor in state.tensors().values():
        tensor.detach().zero_()
    commit = Sharded(out=out, mesh=mesh, resume="auto", every=1, keep=1).restore(state)
    return bits(state) if commit else None


class Story:
    """Two states of one run, the bits of each, and what is wrong after a save of the second over the first."""

    def __init__(self, mesh: Mesh, *, first: bool) -> None:
        snapshot.pack = partial(PACK, limit=4000)  # several files, by several threads
        threading.excepthook = lambda _: None  # threads of a process that is dead
        self.mesh, self.states = mesh, {step: state_at(step) for step in (1, 2, 3)}
        self.bits: dict[int, Bits | None] = {step: bits(state) for step, state in self.states.items()}
        if first:
            self.bits[1] = None
        self.first, self.problems, self.seen = first, list[str](), set[int]()

    def begin(self, out: str) -> None:
        if not self.first:
            save(self.mesh, out, self.states[1])

    def end(self, out: str, what: str, *, landed: bool) -> None:
        """The next start finds a state that was saved, the new one if the save said so; and it can save again."""
        try:
            state = found(self.mesh, out)
            which = next((step for step, expected in self.bits.items() if expected == state), 0)
            self.seen.add(which)
            if which not in ((2,) if landed else (1, 2)):
                self.problems.append(
                    f"{what}: found state {which}, and the save {'had' if landed else 'had not'} landed"
                )
            save(self.mesh, out, self.states[3])
            if found(self.mesh, out) != self.bits[3]:
                self.problems.append(f"{what}: the save after it is not what the next start finds")
        except BaseException as error:
            self.problems.append(f"{what}: {type(error).__name__}: {error}")


def all_points(work: Callable[[Mesh], Story], outcomes: set[int]) -> None:
    """`work` on one rank; its story has no problems, and these outcomes came up."""

    def told(mesh: Mesh) -> tuple[list[str], set[int]]:
        story = work(mesh)
        return story.problems, story.seen

    ((problems, seen),) = on_mesh(told, dp_shard=1)
    assert not problems, "\n".join(problems)
    assert seen == outcomes


@pytest.mark.often("True-power5", others=pytest.mark.campaign("kills"))
@pytest.mark.parametrize(("first", "power"), [*((False, power) for power in POWER), (True, POWER[0]), (True, POWER[2])])
def test_a_local_disk_at_every_operation(tmp_path: Path, first: bool, power: Power) -> None:
    def work(mesh: Mesh) -> Story:
        story = Story(mesh, first=first)
        story.begin(str(tmp_path / "before"))
        (tmp_path / "before").mkdir(exist_ok=True)
        for at, root in runs(tmp_path):
            landed = False
            with faults.crashing(root, at=at) as disk, contextlib.suppress(faults.Crash, StoreError):
                save(mesh, str(root), story.states[2])
                landed = len(disk.operations) <= at
            if power[0] == "is cut":
                disk.cut_power(power[1])
            story.end(str(root), f"{at}: {disk.operations[-1]}", landed=landed)
            if landed:
                return story
        raise AssertionError("it never ends")

    all_points(work, {1, 2})


def runs(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """(a number, a copy of what was there before), without end; one copy at a time."""
    for at in range(1000):
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / "before", root)
        yield at, root


PASSING = ("503", "timeout", "cut", "unanswered", "EIO")
"""What is tried again until it is done."""
LYING = ("unsynced",)
"""The storage says that it is done. Nobody can know better when the one checkpoint before is removed: a run on such storage keeps two."""
MEMORY = [("memory", kind) for kind in ("crash", "torn", "partial", "short", "403", "ENOSPC", "flip", *LYING, *PASSING)]


QUICK = (("memory", "crash"), ("file", "torn"))


@pytest.mark.parametrize(
    ("below", "kind"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.campaign("kills"))
        for each in (*MEMORY, ("file", "crash"), ("file", "torn"), ("file", "unsynced"))
    ],
)
def test_object_storage_at_every_operation(tmp_path: Path, below: str, kind: str) -> None:
    out = f"flaky://memory{tmp_path}" if below == "memory" else f"flaky://file/{tmp_path}/run"

    def before(memory: dict[str, Any]) -> None:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.store.update(memory)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        if (tmp_path / "before").exists():
            shutil.copytree(tmp_path / "before", tmp_path / "run")

    def work(mesh: Mesh) -> Story:
        patience.LONGEST_WAIT = 0.001
        story = Story(mesh, first=False)
        store.use(out, {})
        story.begin(out)
        if below == "file":
            shutil.copytree(tmp_path / "run", tmp_path / "before")
        memory = dict(MemoryFileSystem.store)
        for at in range(1000):
            before(memory)
            store.use(
                out,
                {
                    "at": at,
                    "kinds": kind,
                    "on": "put" if kind in (*flaky.PUT_KINDS, "flip") else ",".join(flaky.OPERATIONS),
                },
            )
            client, landed = store.client(out), False
            with contextlib.suppress(faults.Crash, StoreError):
                save(mesh, out, story.states[2], keep=2 if kind in LYING else 1)
                landed = kind not in ("crash", "torn", "flip", *LYING) or len(client.operations) <= at
            client.cut_power()
            store.use(out, {})
            story.end(out, f"{kind} at {at}: {client.operations[-1]}", landed=landed)
            if len(client.operations) <= at:
                return story
        raise AssertionError("it never ends")

    all_points(work, {2} if kind in PASSING else {1, 2})
