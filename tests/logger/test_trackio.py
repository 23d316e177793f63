"""Trackio, in a database of its own: read back by its own client."""

from pathlib import Path

import pytest
from tracked import STEPS, killed_and_ended

from dtrain.logger.trackio import Trackio

pytestmark = pytest.mark.campaign("kills")


def test_a_killed_run_is_one_run_with_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))  # read as the client is imported
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    killed_and_ended(Trackio, tmp_path / "a", project="p")
    killed_and_ended(Trackio, tmp_path / "b", project="p")
    first, second = storage.get_runs("p")
    assert first == "name" and second.startswith("name "), "another run of that name"
    for name in (first, second):
        rows = [row for row in storage.get_logs("p", name) if "loss" in row]
        assert [row["step"] for row in rows] == [*STEPS]
        assert [row.get("eval_loss") for row in rows] == [None, 0.2, None, None]
