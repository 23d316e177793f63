"""Weights & Biases, offline: its file is read back by its own record type."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tracked import STEPS, killed_and_ended

from dtrain.logger.wandb import Wandb

pytestmark = pytest.mark.campaign("kills")
HEAD, BLOCK = struct.Struct("<IHB"), 32768
"""Of each piece of a record: a checksum, its length and kind, in blocks as LevelDB's log has them."""


def records(path: Path) -> Iterator[Any]:
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, whole = path.read_bytes(), 7, b""
    while at + HEAD.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD.size:
            at += left
            continue
        _, length, kind = HEAD.unpack_from(data, at)
        whole += data[at + HEAD.size : at + HEAD.size + length]
        at += HEAD.size + length
        if kind in (1, 4):  # a whole record, or its last piece
            record, whole = proto.Record(), whole
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_a_killed_run_is_one_folder_with_each_row_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("wandb")
    killed_and_ended(Wandb, tmp_path, mode="offline", project="p", tags=["t"], artifacts="best")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert f"type wandb sync {file.parent}" in capfd.readouterr().out
    there = list(records(file))
    items = [record.history.item for record in there if record.WhichOneof("record_type") == "history"]
    rows = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in each} for each in items]
    assert [row["step"] for row in rows if "loss" in row] == [*STEPS]
    assert {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row} == {10: 0.2}
    (run,) = (record.run for record in there if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, [*run.tags]) == ("p", "name", ["t"])
    assert {item.key: json.loads(item.value_json) for item in run.config.update}["optim"] == {"lr": 0.5}
    artifacts = [record.artifact for record in there if record.WhichOneof("record_type") == "artifact"]
    refs = [entry.ref for each in artifacts if each.type == "model" for entry in each.manifest.contents]
    assert refs == [(tmp_path / "checkpoint/COMMIT.json").as_uri()]
