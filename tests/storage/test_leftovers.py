"""What a process was writing when it was killed goes with the next one that writes there."""

import fcntl
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint.destination import Folder
from dtrain.errors import StoreError
from dtrain.files.predictions import Predictions
from dtrain.storage import leftovers, store


def killed_while_writing(path: Path) -> Path:
    part = path.with_name(f".{path.name}.0123abcd")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(b"half")
    return part


def test_parts_of_killed_writers_are_removed_and_no_others(tmp_path: Path) -> None:
    dead, of_another = killed_while_writing(tmp_path / "a.bin"), killed_while_writing(tmp_path / "b.bin")
    mine = tmp_path / ".a.bin.notes"
    mine.touch()
    with killed_while_writing(tmp_path / "a.bin.0").rename(tmp_path / ".a.bin.89abcdef").open() as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)  # by a process that lives
        leftovers.remove_parts(str(tmp_path), ["a.bin"])
        assert not dead.exists()
        assert {path.name for path in tmp_path.iterdir()} == {of_another.name, mine.name, ".a.bin.89abcdef"}
    leftovers.remove_parts(str(tmp_path / "none"), ["a.bin"])


def test_a_file_is_locked_from_its_first_byte_to_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = store.disk.link

    def looked_at(old: Path, new: Path) -> None:
        leftovers.remove_parts(str(tmp_path), [new.name])  # as another process would
        link(old, new)

    monkeypatch.setattr(store.disk, "link", looked_at)
    store.publish(str(tmp_path / "a"), b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_export_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    dead = killed_while_writing(tmp_path / "model.safetensors")
    Folder(str(tmp_path)).refuse_existing("model.safetensors")
    assert not dead.exists()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(StoreError, match="it is there already"):
        Folder(str(tmp_path)).refuse_existing("model.safetensors")


def test_predictions_that_were_whole_leave_no_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to, facts = tmp_path / "a.jsonl", {"rows": 1}
    predictions: Any = Predictions(str(to))
    assert predictions.begin(facts) == 0
    predictions.write(0, {"x": [1]})
    with monkeypatch.context() as patch:
        patch.setattr(store, "remove", lambda url: None)  # killed before
        predictions.finish(facts, 1)
    dead = killed_while_writing(to)
    assert (tmp_path / "a.jsonl.parts").exists() and predictions.begin(facts) is None
    assert not (tmp_path / "a.jsonl.parts").exists() and not dead.exists()


def test_the_folder_of_a_killed_export_goes_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "dtrain-export-dead").mkdir()
    with leftovers.scratch("export") as one, leftovers.scratch("export") as two:
        assert {*tmp_path.iterdir()} == {one, two}
    assert not [*tmp_path.iterdir()]


def test_a_lock_is_of_one_at_a_time_and_no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, others = tmp_path / "dtrain-0123.lock", tmp_path / "others.lock"
    dead.touch()
    others.touch()
    within, most = list[int](), list[int]()

    def work(number: int) -> None:
        for _ in range(20):
            with leftovers.alone("a"):
                within.append(number)
                most.append(len(within))
                within.remove(number)

    with ThreadPoolExecutor(8) as pool:
        assert len([*pool.map(work, range(8))]) == 8
    assert max(most) == 1 and len(most) == 160
    with leftovers.alone("b"), leftovers.alone("a"):
        assert len([*tmp_path.glob("dtrain-*.lock")]) == 2, "a lock in use stays"
    assert [*tmp_path.iterdir()] == [others]
