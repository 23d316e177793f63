"""The recipe learns, and one rank and two give the same losses."""

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def run(out: Path, *words: str) -> list[dict[str, float]]:
    """Its rows."""
    command = [sys.executable, "-m", "dtrain", "recipe=mypkg/train.yaml", "logger=[]", f"out={out}", *words]
    subprocess.run(command, cwd=PROJECT, check=True, timeout=600)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_two_ranks_give_the_losses_of_one(tmp_path: Path) -> None:
    rows = [run(tmp_path / str(devices), "steps=5", f"devices={devices}") for devices in (1, 2)]
    one, two = ([round(row["loss"], 4) for row in each if "loss" in row] for each in rows)
    assert one == two
    assert len(one) == 5


def test_it_learns(tmp_path: Path) -> None:
    run(tmp_path / "run")
    assert json.loads((tmp_path / "run/result.json").read_text("utf-8"))["metrics"]["eval_accuracy"] > 0.9
