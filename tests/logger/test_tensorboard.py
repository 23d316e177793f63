"""Event files that TensorBoard reads."""

import math
import tempfile
from pathlib import Path

import fsspec
import pytest
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from dtrain.logger.tensorboard import TensorBoard


def events(folder: Path) -> list[tuple[int, str, float]]:
    """(step, tag, value) of every scalar of every file."""
    found = []
    for file in sorted(folder.glob("events.out.tfevents*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_every_scalar_is_read_back(tmp_path: Path) -> None:
    board = TensorBoard(out=str(tmp_path), steps=10)
    board.log(1, {"loss": 2.5, "seen": 8})
    board.log(2, {"loss": 2.0, "seen": 16})
    board.log(2, {"eval_loss": 2.25})
    board.note("only for people")
    board.close()
    assert events(tmp_path / "tensorboard") == [(1, "loss", 2.5), (1, "seen", 8.0), (2, "loss", 2.0), (2, "seen", 16.0), (2, "eval_loss", 2.25)]


def test_a_loss_that_is_no_number_is_kept_and_a_missing_one_is_not(tmp_path: Path) -> None:
    board = TensorBoard(out=str(tmp_path), steps=10)
    board.log(1, {"loss": math.nan, "norm": None})  # type: ignore[dict-item]
    board.close()
    ((step, tag, value),) = events(tmp_path / "tensorboard")
    assert (step, tag) == (1, "loss")
    assert math.isnan(value)


def test_a_run_that_logs_nothing_leaves_nothing(tmp_path: Path) -> None:
    TensorBoard(out=str(tmp_path), steps=10).close()
    assert list(tmp_path.iterdir()) == []


def test_remote_storage_has_the_file_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    board = TensorBoard(out="memory://board", steps=10)
    board.log(1, {"loss": 2.5})
    board.close()
    fsspec.filesystem("memory").get("/board/tensorboard", str(tmp_path / "copy"), recursive=True)
    assert events(tmp_path / "copy") == [(1, "loss", 2.5)]
    assert list((tmp_path / "scratch").iterdir()) == []
