"""Rows as a file of commas."""

import csv
from pathlib import Path

import pytest
from tracked import STEPS, killed_and_ended

from dtrain.logger.csv import Csv


def test_a_killed_run_is_one_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    killed_and_ended(Csv, tmp_path)
    with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [*STEPS]
    assert [row["eval_loss"] for row in rows] == ["", "0.2", "", ""] and [int(row["seen"]) for row in rows] == [
        40,
        80,
        120,
        160,
    ]
    assert capfd.readouterr().out == ""
