"""`dtrain why`: what was predicted of a run beside what its files say."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from dtrain.errors import StoreError, WordsError
from dtrain.predict.report import duration
from dtrain.verb import train, why

WORDS = (
    "model.layers=1",
    "data=synthetic",
    "steps=30",
    "logger=[]",
    "launcher=inline",
    "devices=1",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("why") / "run"
    assert train.run([*WORDS, f"out={out}"]) == 0
    return out


def shown(capsys: pytest.CaptureFixture[str], run: Path) -> dict[str, str]:
    capsys.readouterr()
    assert why.run([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name.strip(): rest for name, _, rest in (line.strip().partition("  ") for line in lines)}


def test_measured_stands_beside_predicted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, run)
    predicted, measured, times = rows["peak of a rank"].replace(" MiB", "").split()
    assert float(times.rstrip("x")) == pytest.approx(float(measured) / float(predicted), rel=0.02)
    assert 0.5 < float(times.rstrip("x")) < 2, "Python and torch count on both sides"
    assert "30 steps" in rows["wall"]


def test_a_run_that_was_slow_is_told_what_to_type(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps are made 1,000 times as long, and one of them 50,000 times."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [{**row, "step_seconds": row["step_seconds"] * (1e3 if row["step"] != 20 else 5e4)} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = shown(capsys, run)
    assert "slower than usual for a" in told["time"] and "dtrain doctor, without words" in told["type"]
    assert "of them slow, which took more than the median by" in told["wall"]


def test_time_that_steps_wait_for_samples_is_told(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    spent = {"time_step": 500.0, "time_data_wait": 300.0, "time_checkpoint_stall": 100.0, "time_evaluate": 50.0}
    rows = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: row[name] for name in row if not name.startswith("time_")} for row in rows]
    rows[-1] |= {**spent, "time_other": 50.0}
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert why.run([str(copied)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for part, seconds in {"30 steps": 500, "waiting for samples": 300, "waiting for saves": 100}.items():
        assert f"{part} {duration(seconds)}" in told
    told = shown(capsys, copied)
    assert "steps wait for them 30% of the time" in told["samples"]
    plan = yaml.safe_load((copied / "plan.yaml").read_text())
    plan["trust"], plan["data"]["workers"] = ["mypkg"], 2
    (copied / "plan.yaml").write_text(yaml.safe_dump(plan))
    told = shown(capsys, copied)
    assert "data.workers=4" in told["samples"] and told["a step"].split() != []
    assert "only you can trust" in told["predicted"]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="find a run at"):
        why.run([str(tmp_path)])
    with pytest.raises(WordsError, match="not 0"):
        why.run([])
