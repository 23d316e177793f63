"""Comet, offline: its archives are read back."""

import json
import zipfile
from pathlib import Path

import pytest
from tracked import STEPS, killed_and_ended

from dtrain.logger.comet import Comet

pytestmark = pytest.mark.campaign("kills")


def test_the_archives_of_a_killed_run_have_each_row_once(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    killed_and_ended(Comet, tmp_path, mode="offline", project="p")
    told, keys = list[dict[str, object]](), set[str]()
    for archive in (tmp_path / "comet").glob("*.zip"):
        keys.add(archive.name.split("-")[0].removesuffix(".zip"))
        with zipfile.ZipFile(archive) as there, there.open("messages.json") as lines:
            told += [json.loads(line) for line in lines]
    losses = [each["payload"]["metric"] for each in told if each["type"] == "metric_msg"]  # type: ignore[index]
    assert sorted(each["step"] for each in losses if each["metricName"] == "loss") == [*STEPS]
    assert len(keys) == 1
