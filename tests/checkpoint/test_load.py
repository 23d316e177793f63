"""Damage of every kind in every file: found before a tensor is touched, and never found where there is none."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import safetensors.torch
import torch

from dtrain.checkpoint import commit as commits
from dtrain.checkpoint import load, snapshot
from dtrain.checkpoint.commit import find
from dtrain.checkpoint.load import Reading
from dtrain.checkpoint.sharded import Sharded
from dtrain.checkpoint.state import TrainState
from dtrain.errors import PreflightError, StoreError
from dtrain.mesh import Mesh
from dtrain.planned import MeshShape
from dtrain.storage import store
from dtrain.storage.attempts import folder

ALONE = Mesh.__new__(Mesh)
"""A mesh of one rank, without a process group: a thousand loads in a few seconds."""
ALONE.rank, ALONE.world, ALONE.shape, ALONE.batch_rank, ALONE.coordinate = 0, 1, MeshShape(), 0, {"tp": 0}


class Held:
    """As much of a TrainState as a checkpoint needs."""

    def __init__(self, step: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.step, self.scale, self.ema, self.loaded = step, None, None, 0
        self.held = {f"model.{name}": torch.randn(6, name, generator=generator) for name in range(1, 6)}
        self.held["optim.1.step"] = torch.tensor(float(step))

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.held

    adapter = base = None
    model = torch.nn.Module()

    def weights(self, *, of_base: bool) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.held.items() if name.startswith("model.")}

    def facts(self) -> dict[str, Any]:
        return {"step": self.step, "optim": {}, "resting": []}

    def make_room(self, names: object) -> None: ...

    def unfit(self, facts: dict[str, Any]) -> str:
        return ""

    def load_facts(self, facts: dict[str, Any]) -> None:
        self.step, self.loaded = facts["step"], self.loaded + 1

    def touched(self) -> bool:
        return any(tensor._version for tensor in self.held.values())

    def same(self, other: "Held") -> bool:
        return all(torch.equal(tensor, other.held[name]) for name, tensor in self.held.items())


def checkpoint(out: Path, **changed: Any) -> Sharded:
    return Sharded(out=str(out), mesh=ALONE, resume="auto", every=1, **{"keep": None, **changed})


def state(loaded: Held) -> TrainState:
    return cast(TrainState, loaded)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An older checkpoint of step 2 and a newer one of step 3, each of several files."""
    monkeypatch.setattr(snapshot.pack, "__defaults__", (200,))
    saving = checkpoint(tmp_path / "out")
    for step in (2, 3):
        saving.save(state(Held(step, step)))
        saving.wait()
    return tmp_path / "out"


def flip(data: bytearray, chance: random.Random) -> bytes:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def zeros(data: bytearray, chance: random.Random) -> bytes:
    """A block that was never written."""
    begin = chance.randrange(len(data))
    end = min(len(data), begin + chance.randrange(1, 512))
    changed = bytes(data[:begin]) + bytes(end - begin) + bytes(data[end:])
    return changed if changed != data else flip(data, chance)


DAMAGES: dict[str, Callable[[bytearray, random.Random], bytes]] = {
    "flip": flip,
    "flips": lambda data, chance: flip(bytearray(flip(data, chance) + b"x"), chance),
    "cut": lambda data, chance: bytes(data[: chance.randrange(len(data))]),
    "empty": lambda data, chance: b"",
    "longer": lambda data, chance: bytes(data) + chance.randbytes(chance.randrange(1, 64)),
    "zeros": zeros,
    "other bytes": lambda data, chance: chance.randbytes(len(data)),
    "a pickle": lambda data, chance: b"\x80\x04cos\nsystem\n(S'touch /tmp/never'\ntR.".ljust(len(data), b"."),
}


def damage(newer: Path, older: Path, chance: random.Random) -> None:
    """One of the files of `newer`, in one of many ways."""
    path = chance.choice(sorted(newer.iterdir()))
    kind = chance.choice([*DAMAGES, "missing", "swapped", "of another checkpoint", "a folder"])
    if kind in DAMAGES:
        path.write_bytes(DAMAGES[kind](bytearray(path.read_bytes()), chance))
        return
    other = chance.choice([file for file in sorted(newer.iterdir()) if file != path])
    here, there = path.read_bytes(), other.read_bytes()
    path.unlink()
    if kind == "swapped":
        path.write_bytes(there)
        other.write_bytes(here)
    elif kind == "of another checkpoint" and (older / path.name).read_bytes() != here:
        path.write_bytes((older / path.name).read_bytes())
    elif kind == "a folder":
        path.mkdir()


def campaign(out: Path, damaged: int, clean: int) -> None:
    root, chance, expected = out / "checkpoints", random.Random(5), {step: Held(step, step) for step in (2, 3)}
    (older,), (newer,) = ((root / f"step-0000000{step}").iterdir() for step in (2, 3))
    good = {path.name: path.read_bytes() for path in newer.iterdir()}
    for number in range(damaged):
        damage(newer, older, chance)
        seen, reading = Held(0, 9), checkpoint(out)
        restored = reading.restore(state(seen))
        assert restored is not None
        assert (seen.step, seen.same(expected[2]), seen.loaded) == (2, True, 1), number
        assert len(reading.damaged) == (newer / commits.NAME).exists(), number
        assert all(len(sentence.splitlines()) == 1 for sentence in reading.damaged)
        shutil.rmtree(newer)
        newer.mkdir()
        for name, data in good.items():
            (newer / name).write_bytes(data)
    for _ in range(clean):
        seen, reading = Held(0, 9), checkpoint(out)
        reading.restore(state(seen))
        assert (seen.step, seen.same(expected[3]), reading.damaged) == (3, True, [])


def test_300_damaged_checkpoints_are_found_and_50_good_ones_are_read(two: Path) -> None:
    campaign(two, 300, 50)


@pytest.mark.slow
def test_10000_damaged_checkpoints_are_found_and_1000_good_ones_are_read(two: Path) -> None:
    campaign(two, 10_000, 1_000)


def test_no_tensor_is_touched_when_all_are_damaged(two: Path) -> None:
    """The last file of each: those before it are as they were saved."""
    for attempt in (two / "checkpoints").glob("*/*"):
        last = max(attempt.glob("*.safetensors"))
        last.write_bytes(last.read_bytes()[:-1] + b"\xff")
    seen, reading = Held(0, 9), checkpoint(two)
    with pytest.raises(
        PreflightError, match=r"no checkpoint under .* can be read: .*bytes are not those that were saved"
    ):
        reading.restore(state(seen))
    assert not seen.touched()
    assert len(reading.damaged) == 2
    with pytest.raises(StoreError, match="its bytes are not those that were saved"):
        checkpoint(two).load_weights(str(two), state(seen))
    assert not seen.touched()


def test_storage_that_does_not_answer_is_no_damage(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passing over a good checkpoint would lose what was done since the one before it."""
    read = store.read

    def down(url: str) -> bytes:
        if url.endswith(".safetensors"):
            raise StoreError("the network is down")
        return read(url)

    monkeypatch.setattr(store, "read", down)
    with pytest.raises(StoreError, match="the network is down"):
        checkpoint(two).restore(state(Held(0, 9)))


def test_what_is_larger_than_memory_is_read_and_verified_twice(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "KEPT_BYTES", 300)
    seen, reads, read = Held(0, 9), list[str](), load.read_file
    monkeypatch.setattr(load, "read_file", lambda where, file: reads.append(where) or read(where, file))  # type: ignore[func-returns-value]
    checkpoint(two).restore(state(seen))
    assert seen.same(Held(3, 3))
    assert len(set(reads)) < len(reads) < 2 * len(set(reads)), "what fitted was kept"


def hostile(out: Path, tensors: dict[str, torch.Tensor], **pieces: Any) -> str:
    """A checkpoint whose digests are right, and whose one file holds `tensors`, said to hold the piece `pieces` of model.1."""
    url = Path(folder(str(out), 7)) / "a"
    url.mkdir(parents=True)
    data = safetensors.torch.save(tensors)
    (url / "x.safetensors").write_bytes(data)
    import hashlib

    shape = pieces.get("shape", [6, 1])
    commits.write(
        str(url),
        {
            "step": 7,
            "facts": {"step": 7, "optim": {}},
            "files": [{"name": "x.safetensors", "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}],
            "tensors": {"model.1": {"shape": shape, "dtype": "torch.float32"}},
            "pieces": [
                {
                    "name": "model.1",
                    "key": "model.1",
                    "file": "x.safetensors",
                    "shape": shape,
                    "offset": [0] * len(shape),
                }
                | pieces
            ],
        },
    )
    return str(url)


@pytest.mark.parametrize(
    ("tensors", "pieces"),
    [
        ({"model.1": torch.zeros(5, 1)}, {}),
        ({"model.1": torch.zeros(6, 1, dtype=torch.float64)}, {}),
        ({"model.2": torch.zeros(6, 1)}, {}),
        ({"model.1": torch.zeros(6, 1)}, {"key": "../../x"}),
    ],
)
def test_a_file_that_is_not_what_the_commit_says_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], pieces: dict[str, Any]
) -> None:
    url, target = hostile(tmp_path, tensors, **pieces), torch.zeros(6, 1)
    with pytest.raises(commits.DamagedError, match="does not match the commit"):
        Reading(url, find(url)[1], {"model.1": target}).verify()


def test_bfloat16_becomes_float32_and_whole_numbers_do_not(tmp_path: Path) -> None:
    url = hostile(tmp_path, {"model.1": torch.full((6, 1), 1.00390625)})
    commit = find(url)[1]
    half = {"model.1": torch.zeros(6, 1, dtype=torch.bfloat16)}
    reading = Reading(url, commit, half)
    reading.verify()
    reading.fill()
    assert torch.equal(half["model.1"], torch.ones(6, 1, dtype=torch.bfloat16))
    whole = {"model.1": torch.zeros(6, 1, dtype=torch.int64)}
    assert load.mismatches(commit, whole, whole, ("model.",)) == ["model.1 is torch.float32 there, torch.int64 here"]
