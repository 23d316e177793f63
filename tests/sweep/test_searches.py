"""A search as a user runs it, with models whose loss is a known function of their words."""

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import commands
import pytest
import yaml
from commands import COMMAND, Forked
from killing import mentioning

KNOWN = ["model._target_=sweeping.Known", "trust=[sweeping]", "objective=own", "data=synthetic", "data.inputs=[1]"]
KNOWN += ["data.outputs=1", "data.task=regression", "data.samples=16", "steps=1", "hook=[]", "logger=[]"]
SPACE = ["model.x=tag(log,interval(1e-4,1))", "model.y=interval(0,1)", "model.kind=a,b"]


def drawn(root: Path) -> list[dict[str, Any]]:
    """The values of each trial."""
    return [json.loads(path.read_text())["values"] for path in sorted(root.glob("trials/*.json"))]


def statuses(root: Path) -> list[str]:
    return [json.loads(path.read_text())["status"] for path in root.glob("*/result.json")]


def best(place: Path, out: str) -> str:
    """The name of the best job, which `sweep best` gives."""
    shown = commands.run("sweep", "best", out, cwd=place)
    return re.findall(rf"recipe={out}/(\S+)/config.yaml", shown.stdout)[0]


@pytest.mark.needs("optuna")
def test_a_search_draws_its_jobs_and_goes_on_with_more_trials(tmp_path: Path) -> None:
    words = [*KNOWN, *SPACE, "sweep.search=tpe", "sweep.out=s"]
    first = commands.run("-m", *words, "sweep.trials=5", "sweep.begin=[{model.x:0.01,model.y:0.3}]", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    root = tmp_path / "s"
    assert "5 trials in s" in first.stdout and "[5/5] finished model.x=" in first.stdout
    assert yaml.safe_load((root / "sweep.yaml").read_text())["spaces"] == [
        {"model.x": "tag(log,interval(0.0001,1))", "model.y": "interval(0,1)", "model.kind": ["a", "b"]}
    ]
    before = drawn(root)
    assert len(before) == 5 and (before[0]["model.x"], before[0]["model.y"]) == (0.01, 0.3)
    other = commands.run("-m", *words, "sweep.trials=7", cwd=tmp_path)
    assert other.returncode == 2 and "sweep.begin is [] here and [{model.x:0.01,model.y:0.3}] there" in other.stderr
    more = commands.run("-m", *words, "sweep.trials=7", "sweep.begin=[{model.x:0.01,model.y:0.3}]", cwd=tmp_path)
    assert more.returncode == 0 and "7 trials in s, of which 5 are finished" in more.stdout, more.stderr
    assert drawn(root)[:5] == before and len(drawn(root)) == 7 and statuses(root) == ["finished"] * 7
    job = next(root.glob("*/result.json")).parent
    (job / "result.json").unlink()
    wrong = commands.run("sweep", "work", "s", "trust=[sweeping]", "sweep.trials=9", cwd=tmp_path)
    assert wrong.returncode == 2 and "sweep.trials=9 (command line): the words of a sweep are" in wrong.stderr
    work = commands.run("sweep", "work", "s", "trust=[sweeping]", cwd=tmp_path)
    assert work.returncode == 0 and "7 trials in s, of which 6 are finished" in work.stdout, work.stderr
    assert statuses(root) == ["finished"] * 7 and len(drawn(root)) == 7
    best = commands.run("sweep", "best", "s", cwd=tmp_path)
    losses = {
        path.parent.name: json.loads(path.read_text())["metrics"]["eval_loss"] for path in root.glob("*/result.json")
    }
    assert f"recipe=s/{min(losses, key=lambda name: losses[name])}/config.yaml" in best.stdout, best.stderr


def test_jobs_that_fail_are_trials_too(tmp_path: Path) -> None:
    words = [*KNOWN, "model.fails=true", "model.x=tag(log,interval(1e-2,1))", "sweep.search=random", "sweep.trials=6"]
    done = commands.run("-m", *words, "sweep.out=s", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    fail = [values["model.x"] > 0.1 for values in drawn(tmp_path / "s")]
    assert len(fail) == 6 and 0 < sum(fail) < 6
    assert f"failed: {sum(fail)} x ValueError: planned" in done.stderr
    assert len(statuses(tmp_path / "s")) == 6 - sum(fail)
    assert f"{6 - sum(fail)} of 6 trials are finished" in done.stdout


def test_a_time_limit_begins_no_more_jobs(tmp_path: Path) -> None:
    words = [*KNOWN, *SPACE, "sweep.search=random", "sweep.trials=5000", "sweep.time_limit=2", "sweep.out=s"]
    done = commands.run("-m", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of 5000 trials are finished; the same command goes on" in done.stdout
    assert statuses(tmp_path / "s") and len(statuses(tmp_path / "s")) >= len(drawn(tmp_path / "s")) - 1


def test_two_metrics_give_a_front(tmp_path: Path) -> None:
    words = [
        "model=mlp",
        "data=synthetic",
        "data.samples=64",
        "objective=classification",
        "steps=2",
        "hook=[]",
        "logger=[]",
    ]
    words += ["optim.lr=tag(log,interval(1e-4,1))", "model.width=4,8", "sweep.search=nsga2", "sweep.trials=6"]
    done = commands.run("-m", *words, "sweep.metric=[eval_loss,eval_accuracy]", "sweep.out=s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = {
        path.parent.name: json.loads(path.read_text())["metrics"] for path in (tmp_path / "s").glob("*/result.json")
    }
    pairs = {name: (metrics["eval_loss"], -metrics["eval_accuracy"]) for name, metrics in results.items()}
    front = {
        name
        for name, (loss, other) in pairs.items()
        if not any(a <= loss and b <= other and (a, b) != (loss, other) for a, b in pairs.values())
    }
    best = commands.run("sweep", "best", "s", cwd=tmp_path)
    assert {name for name in pairs if f"recipe=s/{name}/config.yaml" in best.stdout} == front


def test_a_table_of_the_jobs_has_every_metric_and_every_job(tmp_path: Path) -> None:
    words = [*KNOWN, "model.x=interval(0.001,0.1)", "sweep.search=nsga2", "sweep.trials=2", "sweep.out=s"]
    done = commands.run("-m", *words, "sweep.metric=[eval_loss,loss]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    next((tmp_path / "s").glob("*/config.yaml")).unlink()
    for act, rows in ("ls", 2), ("best", 1):
        table = [line.split() for line in commands.run("sweep", act, "s", cwd=tmp_path).stdout.splitlines()]
        (head,) = (line for line in table if line[:1] == ["name"])
        assert head[3:-1] == ["step", "eval_loss", "loss", "status"][1:], head
        assert sum("finished" in line for line in table) == rows, table


def test_of_jobs_that_are_equal_the_first_by_name_is_the_best_and_the_others_are_named(tmp_path: Path) -> None:
    words = [*KNOWN, "model.x=0.01,0.02,0.03", "sweep.out=s"]
    assert commands.run("-m", *words, cwd=tmp_path).returncode == 0
    places = sorted((tmp_path / "s").glob("*/result.json"))
    for path in places:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": {"eval_loss": 0.5}}))
    first, *others = [path.parent.name for path in places]
    ended = commands.run("-m", *words, cwd=tmp_path).stdout.splitlines()
    asked = commands.run("sweep", "best", "s", cwd=tmp_path).stdout.splitlines()
    assert f"best: s/{first}" in ended and not any(f"best: s/{other}" in ended for other in others)
    for shown in (ended, asked):
        assert f"with the same eval_loss: {', '.join(others)}. The best is the first by name." in shown
    assert [line for line in asked if "recipe=" in line] == [
        f"run it again: dtrain recipe=s/{first}/config.yaml out=<another place>"
    ]


def test_a_metric_that_is_nan_is_not_replaced_by_another_number(tmp_path: Path) -> None:
    words = [*KNOWN, "model.x=0.01,0.02", "sweep.out=s"]
    assert commands.run("-m", *words, cwd=tmp_path).returncode == 0
    for path in (tmp_path / "s").glob("*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": {"eval_loss": None}}))
    best = commands.run("sweep", "best", "s", cwd=tmp_path)
    assert best.returncode == 2 and "no job in s has finished with a finite eval_loss" in best.stderr, best.stderr


def begin(place: Path, *words: str) -> "subprocess.Popen[str]":
    return Forked([*COMMAND, "-m", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=place)


@pytest.mark.often("tpe")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("search", ["tpe", "cmaes", "nsga2"])
def test_a_search_that_was_killed_again_and_again_has_the_trials_of_one_that_was_not(
    search: str, tmp_path: Path
) -> None:
    words = [*KNOWN, *SPACE, f"sweep.search={search}", "sweep.trials=30", "sweep.parallel=3"]
    words += ["sweep.metric=[eval_loss,loss]"] if search == "nsga2" else []
    began = time.monotonic()
    calm = commands.run("-m", *words, "sweep.out=calm", cwd=tmp_path, timeout=240)
    seconds = time.monotonic() - began
    assert calm.returncode == 0, calm.stderr
    chance, kills = random.Random(search), 0
    while kills < 8:
        sweep = begin(tmp_path, *words, "sweep.out=killed")
        time.sleep(chance.uniform(0.05, 0.25) * seconds)
        os.kill(sweep.pid, signal.SIGKILL)
        sweep.communicate(timeout=60)
        kills += sweep.returncode == -signal.SIGKILL
        if sweep.returncode == 0:
            break
        deadline = time.monotonic() + 60
        while mentioning(str(tmp_path / "killed")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    last = commands.run("-m", *words, "sweep.out=killed", cwd=tmp_path, timeout=240)
    assert last.returncode == 0, last.stderr
    assert kills >= 3 and drawn(tmp_path / "killed") == drawn(tmp_path / "calm")
    assert statuses(tmp_path / "killed") == ["finished"] * 30


@pytest.mark.campaign("kills")
def test_two_commands_share_one_search(tmp_path: Path) -> None:
    words = [*KNOWN, *SPACE, "steps=20", "sweep.search=tpe", "sweep.trials=24", "sweep.parallel=2", "sweep.out=s"]
    both = [begin(tmp_path, *words) for _ in range(2)]
    for sweep in both:
        output, error = sweep.communicate(timeout=240)
        assert sweep.returncode == 0, error
        assert "[24/24]" in output
    jobs = [path.parent for path in (tmp_path / "s").glob("*/result.json")]
    assert len(jobs) == 24 == len(drawn(tmp_path / "s"))
    assert [(job / "events.jsonl").read_text().count('"event": "started"') for job in jobs] == [1] * 24
