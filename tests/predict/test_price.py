"""The price of a run: hours x GPUs, or nodes without GPUs, x cluster.price, wherever a time is predicted or told."""

import json
import re
from pathlib import Path

import commands
import pytest

from dtrain.__main__ import main
from dtrain.predict import price
from dtrain.report import of_run, runs

SWEPT = ("plan", "-m", "cluster=h100x8", "model=mlp", "data=synthetic", "strategy=fsdp", "batch=256", "nodes=2,4")


def test_gpus_are_paid_for_or_nodes_without_them() -> None:
    hours, figures = 3600 * 2.0, {"price": 1.5}
    assert price.cost(hours, {**figures, "gpus": 8}, world=16, nodes=2) == 2 * 16 * 1.5
    assert price.cost(hours, {**figures, "gpus": 0}, world=16, nodes=2) == 2 * 2 * 1.5
    assert price.cost(hours, {"gpus": 8}, world=16, nodes=2) is None
    assert [price.amount(each) for each in (12345.6, 99.94, 0.01234)] == ["12,346", "99.9", "0.0123"]


def test_a_plan_and_the_plans_of_a_sweep_have_their_price(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "json", *SWEPT[2:-1], "nodes=2", "cluster.price=1e6"]) == 0
    plan = json.loads(capsys.readouterr().out)
    seconds = plan["prediction"]["time"]["seconds"] * plan["plan"]["steps"]
    assert plan["price"] == pytest.approx(seconds * 16 * 1e6 / 3600)
    assert main([*SWEPT, "cluster.price=1e6"]) == 0
    heads, *rows = capsys.readouterr().out.splitlines()[1:]
    assert re.search(r" price  words that vary$", heads)
    assert rows[0].split()[-2] == price.amount(plan["price"])
    assert main([*SWEPT]) == 0
    assert "price" not in capsys.readouterr().out


def test_a_run_tells_what_it_would_cost_and_has_cost(tmp_path: Path) -> None:
    words = ("model=mlp", "data=synthetic", "objective=regression", "steps=4", "hook=[]", "logger=[]", "out=run")
    done = commands.run(*words, "cluster=laptop", "cluster.price=3600", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last = re.search(r"in ([\d.]+) s, at a price of ([\d.]+) \(cluster.price=3600\)", done.stdout.replace("\n", " "))
    seconds = json.loads((tmp_path / "run/result.json").read_text())["wall_seconds"]
    assert last and last[2] == price.amount(seconds), done.stdout
    (run,) = runs.below(str(tmp_path / "run"))
    page = of_run.data(run)
    assert dict(page["machine"])["price"] == price.amount(page["seconds"])
    assert "at a price" not in commands.run(*words[:3], "steps=6", *words[4:], cwd=tmp_path).stdout
