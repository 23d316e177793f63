"""COMMIT.json: written once, last; what does not verify is no checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import commit
from dtrain.errors import StoreError


def attempt(out: Path, step: int, name: str = "a", **changed: Any) -> Path:
    """A committed attempt with one file of four bytes."""
    folder = Path(commit.folder(str(out), step)) / name
    folder.mkdir(parents=True)
    (folder / "rank-0.safetensors").write_bytes(b"1234")
    commit.write(str(folder), {"step": step, "files": [{"name": "rank-0.safetensors", "size": 4}], **changed})
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert commit.read(str(attempt(tmp_path, 3, facts={"a": 1})))["facts"] == {"a": 1}


def test_a_commit_is_never_replaced(tmp_path: Path) -> None:
    folder = attempt(tmp_path, 3)
    with pytest.raises(StoreError, match=r"COMMIT\.json"):
        commit.write(str(folder), {"step": 4, "files": []})
    assert commit.read(str(folder))["step"] == 3


def cut(folder: Path) -> None:
    path = folder / commit.NAME
    path.write_bytes(path.read_bytes()[:-20])


def changed(folder: Path) -> None:
    path = folder / commit.NAME
    path.write_text(path.read_text().replace('"step": 3', '"step": 9'))


def without_digest(folder: Path) -> None:
    document = json.loads((folder / commit.NAME).read_text())
    del document["digest"]
    (folder / commit.NAME).write_text(json.dumps(document))


DAMAGES: dict[str, tuple[Any, str]] = {
    "cut": (cut, "damaged"),
    "changed": (changed, "its digest differs"),
    "a list": (lambda folder: (folder / commit.NAME).write_text("[]"), "damaged"),
    "no digest": (without_digest, "damaged"),
    "no shard": (lambda folder: (folder / "rank-0.safetensors").unlink(), "rank-0.safetensors is missing or has another size"),
    "half a shard": (lambda folder: (folder / "rank-0.safetensors").write_bytes(b"12"), "rank-0.safetensors is missing or has another size"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, damage: str) -> None:
    good, bad = attempt(tmp_path, 2), attempt(tmp_path, 3)
    act, said = DAMAGES[damage]
    act(bad)
    with pytest.raises(StoreError, match=said) as caught:
        commit.read(str(bad))
    assert str(bad) in str(caught.value)
    chosen, damaged = commit.newest(str(tmp_path))
    assert chosen is not None
    assert chosen[0] == str(good)
    assert len(damaged) == 1
    assert said in damaged[0]


def test_a_file_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"1234")
    folder = attempt(tmp_path, 3, files=[{"name": "../../../secret", "size": 4}])
    with pytest.raises(StoreError, match="is no plain file name"):
        commit.read(str(folder))


def test_a_newer_format_is_refused_by_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "FORMAT", 2)
    folder = attempt(tmp_path, 3)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="format 2, this version reads 1"):
        commit.read(str(folder))


def test_what_was_never_committed_is_passed_over_in_silence(tmp_path: Path) -> None:
    attempt(tmp_path, 2)
    (attempt(tmp_path, 3) / commit.NAME).unlink()
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    chosen, damaged = commit.newest(str(tmp_path))
    assert chosen is not None
    assert (chosen[1]["step"], damaged) == (2, [])


def test_the_newest_step_wins_and_of_one_step_the_newest_attempt(tmp_path: Path) -> None:
    for step, name in ((2, "20250101T000000-b"), (10, "20250101T000000-b"), (10, "20250102T000000-a"), (9, "20260101T000000-z")):
        attempt(tmp_path, step, name)
    chosen, _ = commit.newest(str(tmp_path))
    assert chosen is not None
    assert chosen[0].endswith("step-00000010/20250102T000000-a")


def test_nothing_is_nothing(tmp_path: Path) -> None:
    assert commit.newest(str(tmp_path / "none")) == (None, [])
