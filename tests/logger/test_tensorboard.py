"""Event files that TensorBoard reads."""

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pool import ranks
from small import plan
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from dtrain.logger.facts import facts
from dtrain.logger.tensorboard import TensorBoard
from dtrain.train import train


def events(folder: Path) -> list[tuple[int, str, float]]:
    """(step, tag, value) of every scalar of every file."""
    return [(step, value.tag, value.simple_value) for step, value in values(folder) if not value.HasField("metadata")]


def values(folder: Path) -> list[tuple[int, Any]]:
    points = []
    for file in sorted(folder.glob("events.out.tfevents*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            points += [(event.step, value) for value in event.summary.value]
    return points


def test_every_scalar_is_read_back(tmp_path: Path) -> None:
    board = TensorBoard(out=str(tmp_path), steps=10)
    board.scalars(1, {"loss": 2.5, "lr_head": 0.5, "peak_bytes": 1024, "tokens_per_second": 9.0})
    board.scalars(2, {"eval_loss": 2.25})
    board.end({"status": "finished"})
    assert events(tmp_path / "tensorboard") == [
        (1, "train/loss", 2.5), (1, "train/lr_head", 0.5), (1, "speed/peak_bytes", 1024.0), (1, "speed/tokens_per_second", 9.0), (2, "eval/loss", 2.25),
    ]  # fmt: skip


def test_texts_are_read_back_at_their_steps_as_they_stand(tmp_path: Path) -> None:
    board = TensorBoard(out=str(tmp_path), steps=10)
    board.text(0, "note", "42 parameters")
    board.scalars(5, {"loss": 2.5})
    board.text(5, "sample", "\n# no heading\n  said the model\n")
    board.end({"status": "finished"})
    texts = [(step, value) for step, value in values(tmp_path / "tensorboard") if value.tag == "notes"]
    assert [(step, value.tensor.string_val[0].decode()) for step, value in texts] == [
        (0, "    42 parameters\n"), (5, "    # no heading\n      said the model\n"),
    ]  # fmt: skip
    assert {value.metadata.plugin_data.plugin_name for _, value in texts} == {"text"}


def test_what_decides_the_run_is_its_hparams_and_secrets_are_not(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    made = plan("optim.lr=0.5", "checkpoint.keep=7")
    board = TensorBoard(out=str(tmp_path), steps=10)
    board.begin(facts(made))
    board.scalars(1, {"loss": 2.5})
    board.end({"status": "finished"})
    (content,) = [
        value.metadata.plugin_data.content
        for _, value in values(tmp_path / "tensorboard")
        if value.tag.startswith("_hparams_")
    ]
    hparams = HParamsPluginData.FromString(content).session_start_info.hparams
    assert hparams["optim.lr"].number_value == 0.5 and hparams["batch.size"].number_value == made.batch.size
    assert hparams["optim._target_"].string_value.startswith("dtrain.optim") and not any(
        "checkpoint" in name or "_about_" in name for name in hparams
    )


def test_a_loss_that_is_no_number_is_kept_and_a_missing_one_is_not(tmp_path: Path) -> None:
    board = TensorBoard(out=str(tmp_path), steps=10)
    board.scalars(1, {"loss": math.nan, "norm": None})  # type: ignore[dict-item]
    board.end({"status": "finished"})
    ((step, tag, value),) = events(tmp_path / "tensorboard")
    assert (step, tag) == (1, "train/loss")
    assert math.isnan(value)


def test_a_run_that_goes_on_from_an_older_step_has_each_point_once(tmp_path: Path) -> None:
    """As after a kill: the steps after its newest checkpoint were logged before."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [
        "model=mlp",
        "data=synthetic",
        "objective=regression",
        "steps=8",
        "hook=[]",
        "logger=[tensorboard]",
        "log.every=1",
    ]
    words += ["checkpoint.every=4", "evaluate.every=2", f"out={tmp_path}"]
    ranks(1, train, plan(*words, "stop_after=6"))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    ranks(1, train, plan(*words))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [point.step for point in board.Scalars("eval/loss")] == [2, 4, 6, 8]
    assert len([tag for tag in board.PluginTagToContent("hparams") if tag.startswith("_hparams_")]) == 1


def test_a_run_that_logs_nothing_leaves_nothing(tmp_path: Path) -> None:
    TensorBoard(out=str(tmp_path), steps=10).end({"status": "finished"})
    assert list(tmp_path.iterdir()) == []


def test_remote_storage_has_the_file_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    board = TensorBoard(out="memory://board", steps=10)
    board.scalars(1, {"loss": 2.5})
    board.end({"status": "finished"})
    fsspec.filesystem("memory").get("/board/tensorboard", str(tmp_path / "copy"), recursive=True)
    assert events(tmp_path / "copy") == [(1, "train/loss", 2.5)]
    assert list((tmp_path / "scratch").iterdir()) == []
