"""Sweeps that stop jobs early, as a user runs them: what goes on is as if it had never stopped, and no kill changes who
does.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import commands
import pytest
from commands import COMMAND, Forked
from killing import descendants, mentioning

SMALL = ["model=mlp", "data=synthetic", "data.samples=64", "objective=regression", "hook=[]", "logger=[]"]
RATES = "optim.lr=1e-4,1e-3,1e-2,3e-2,1e-1,1"


def sweep(place: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    done = commands.run("-m", *SMALL, *words, cwd=place, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def figures(root: Path, like: Mapping[str, Mapping[int, float]] | None = None) -> dict[str, dict[int, float]]:
    """Each job -> the steps at which it stopped or finished -> its held-out loss there. `like`: the steps are those of
    these figures, because a kill between result.json and its event leaves none.
    """
    curves = dict[str, dict[int, float]]()
    for journal in root.glob("*/events.jsonl"):
        events = [json.loads(line) for line in journal.read_text().splitlines()]
        name = journal.parent.name
        ends = {event["step"] for event in events if event["event"] in ("stopped", "finished")}
        ends |= (like or {}).get(name, {}).keys()
        curves[name] = {
            event["step"]: event["eval_loss"]
            for event in events
            if event["event"] == "evaluated" and event["step"] in ends
        }
    return curves


def losses(job: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in map(json.loads, (job / "metrics.jsonl").read_text().splitlines())}


def result(job: Path) -> dict[str, Any]:
    return dict(json.loads((job / "result.json").read_text()))


@pytest.mark.campaign("commands")
def test_jobs_that_failed_are_run_again_where_the_sweep_decides_which_go_on(tmp_path: Path) -> None:
    words = ["-m", "model._target_=sweeping.Trouble", "trust=[sweeping]", "data=synthetic", "data.inputs=[16]"]
    words += ["data.samples=64", "objective=classification", "hook=[]", "logger=[]", "steps=9", "sweep.out=s"]
    words += ["model.how=raises", f"model.once={tmp_path}/once", "seed=0,1,2", "sweep.stop=halving"]
    first = commands.run(*words, cwd=tmp_path)
    assert first.returncode == 1 and "1 x ValueError: planned" in first.stderr, first.stderr
    (job,) = [path.parent.name for path in (tmp_path / "s").glob("*/failure.json")]
    named = commands.run("sweep", "retry", "s", job, "trust=[sweeping]", cwd=tmp_path)
    assert named.returncode == 2 and "Type dtrain sweep retry s for all of them" in named.stderr
    again = commands.run("sweep", "retry", "s", "trust=[sweeping]", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert not [*(tmp_path / "s").glob("*/failure.json")]


def test_halving_stops_the_worse_jobs_and_the_best_is_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    words = [RATES, "steps=24", "sweep.stop=halving", "sweep.rung=4", "sweep.factor=2", "sweep.out=s"]
    first = sweep(tmp_path, *words)
    root, curves = tmp_path / "s", figures(tmp_path / "s")
    assert sorted(map(max, curves.values())) == [4, 4, 4, 8, 8, 24]
    assert "1 of 6 jobs are finished, 5 stopped early: 52 steps of 144" in first.stdout
    for rung, room in (4, 3), (8, 1):
        there = {name: curve[rung] for name, curve in curves.items() if rung in curve}
        on = {name for name, curve in curves.items() if max(curve) > rung}
        assert on == set(sorted(there, key=lambda name: there[name])[:room])
    (best,) = (name for name, curve in curves.items() if 24 in curve)
    for name, curve in curves.items():
        job = root / name
        assert list(job.glob(f"checkpoints/step-{max(curve):08d}/*/COMMIT.json")), "it keeps its checkpoint"
        assert result(job)["metrics"]["eval_loss"] == curve[max(curve)]
    alone = commands.run(f"recipe={root / best}/config.yaml", "out=alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert losses(tmp_path / "alone") == losses(root / best)
    assert result(tmp_path / "alone")["metrics"] == result(root / best)["metrics"]
    assert commands.run("sweep", "ls", "s", cwd=tmp_path).stdout.count("stopped early") == 5
    before = {path: path.read_bytes() for path in root.glob("*/events.jsonl")}
    again = sweep(tmp_path, *words)
    assert "[step" not in again.stdout and {path: path.read_bytes() for path in before} == before
    whole = sweep(tmp_path, *words[:2], "sweep.out=s")
    assert "6 of 6" not in whole.stdout and set(map(max, figures(root).values())) == {24}, "without it all go on"


@pytest.mark.campaign("commands")
def test_a_population_goes_on_from_the_checkpoints_of_the_best(tmp_path: Path) -> None:
    words = [RATES, "steps=12", "sweep.stop=population", "sweep.rung=4", "sweep.factor=3", "sweep.out=s"]
    sweep(tmp_path, *words)
    root, curves = tmp_path / "s", figures(tmp_path / "s")
    children = dict[str, tuple[str, int]]()
    for name in curves:
        events = [json.loads(line) for line in (root / name / "events.jsonl").read_text().splitlines()]
        for event in (event for event in events if event["event"] == "forked"):
            children[name] = event["source"].split("/")[-4], event["step"]
    assert sorted(step for _, step in children.values()) == [4, 4, 8, 8]
    assert sum(12 in curve for curve in curves.values()) == 6
    for name, (parent, step) in children.items():
        there = sorted(curve[step] for curve in curves.values() if step in curve)
        assert curves[parent][step] in there[:2]
        assert min(losses(root / name)) == step + 1
    assert sum(len(losses(root / name)) for name in curves) == 6 * 12, "the steps of six whole jobs"
    assert "[step" not in sweep(tmp_path, *words).stdout


@pytest.mark.campaign("commands")
def test_another_command_stops_jobs_as_the_first_one_said(tmp_path: Path) -> None:
    words = ["optim.lr=3e-2,1e-1,1e-2,3e-3,1e-3,3e-4,1e-4", "steps=8", "sweep.stop=median"]
    words += ["sweep.rung=4", "sweep.out=s"]
    sweep(tmp_path, *words)
    wanted = figures(tmp_path / "s")
    assert {4, 8} == set(map(max, wanted.values()))
    for name in random.Random(0).sample(sorted(wanted), 3):
        shutil.rmtree(tmp_path / "s" / name)
    assert len(figures(tmp_path / "s")) == 4
    other = commands.run("sweep", "work", "s", "sweep.stop=none", cwd=tmp_path)
    assert other.returncode == 2 and "those of its sweep.yaml. Leave it out." in other.stderr, other.stderr
    work = commands.run("sweep", "work", "s", cwd=tmp_path, timeout=240)
    assert work.returncode == 0, work.stderr
    assert figures(tmp_path / "s") == wanted


def test_a_search_learns_from_first_rungs(tmp_path: Path) -> None:
    words = ["optim.lr=tag(log,interval(1e-4,1))", "sweep.search=random", "sweep.trials=8", "sweep.stop=halving"]
    words += ["sweep.factor=4"]
    done = sweep(tmp_path, *words, "steps=16", "sweep.out=s")
    assert "halving at 4 of 16 steps: one job in 4, the best, goes on" in done.stdout
    assert sorted(map(max, figures(tmp_path / "s").values())) == [4] * 6 + [16] * 2
    assert "[step" not in sweep(tmp_path, *words, "steps=16", "sweep.out=s").stdout


def test_contradictions_are_told_before_the_first_job(tmp_path: Path) -> None:
    for words, sentences in (
        ([RATES, "sweep.rung=3"], ["sweep.rung=3: nothing reads it. Type sweep.stop=halving"]),
        (
            [RATES, "sweep.stop=halving", "stop_after=3", "resume=must"],
            ["stop_after: with sweep.stop=halving the sweep says where jobs stop", "resume: with sweep.stop=halving"],
        ),
        ([RATES, "sweep.stop=halving", "sweep.rung=40"], ["sweep.rung=40: jobs end at steps=24. Type sweep.rung=8"]),
        ([RATES, "sweep.stop=halving", "steps=1"], ["steps=1 leaves no room for a rung. Type steps=30"]),
        (["seed=0,1", "sweep.stop=halving"], ["it compares 3 jobs or more, not 2."]),
        (["seed=0,1,2", "sweep.stop=median"], ["it compares 5 jobs or more, not 3."]),
        ([RATES, "steps=24,48", "sweep.stop=halving"], ["some have steps=24, others 48. Type steps=<one number>."]),
        (
            [RATES, "seed=0,1", "model.width=16,32", "optim=adamw,sgd", "sweep.stop=population"],
            [f"cannot go on from the checkpoint of one with another {key}." for key in ("model", "seed", "optim")],
        ),
        (
            ["optim.lr=interval(1e-4,1e-2)", "sweep.search=tpe", "sweep.trials=9", "sweep.stop=population"],
            [
                "sweep.stop=population: it changes the words itself, as sweep.search=tpe would. Type sweep.search=random."
            ],
        ),
        ([RATES, "sweep.stop=quarter"], ["sweep.stop=quarter"]),
        ([RATES, "sweep.stop=halving", "sweep.metric=eval_f1"], ["no job writes this figure"]),
    ):
        more = [] if any(word.startswith("steps=") for word in words) else ["steps=24"]
        done = commands.run("-m", *SMALL, *more, *words, cwd=tmp_path)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        for sentence in sentences:
            assert sentence in done.stderr, (words, done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.often("population")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("rule", ["halving", "median", "population"])
def test_kills_of_command_and_jobs_change_no_decision(rule: str, tmp_path: Path) -> None:
    words = ["optim.lr=1e-4,3e-4,1e-3,3e-3,1e-2,3e-2,1e-1,1", "steps=300", "checkpoint.every=20"]
    words += [f"sweep.stop={rule}", "sweep.rung=75", "sweep.retries=3"]
    sweep(tmp_path, *words, "sweep.out=whole")
    wanted, chance = figures(tmp_path / "whole"), random.Random(rule)
    for _ in range(6):
        running: Any = Forked([*COMMAND, "-m", *SMALL, *words, "sweep.out=killed"], stdout=-3, stderr=-3, cwd=tmp_path)
        for _again in range(4):
            time.sleep(chance.uniform(0.2, 0.9))
            jobs = [pid for pid in descendants(running.pid) if b"dtrain-job" in command_line(pid)]
            if jobs:
                os.kill(chance.choice(jobs), signal.SIGKILL)
        os.kill(running.pid, signal.SIGKILL)
        running.communicate(timeout=60)
        deadline = time.monotonic() + 60
        while mentioning(str(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.05)
    sweep(tmp_path, *words, "sweep.out=killed")
    assert figures(tmp_path / "killed", like=wanted) == wanted
    for name in wanted:
        assert losses(tmp_path / "killed" / name) == losses(tmp_path / "whole" / name), name


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.often("halving")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("rule", ["halving", "population"])
def test_two_commands_decide_alike(rule: str, tmp_path: Path) -> None:
    words = [RATES, "steps=60", f"sweep.stop={rule}", "sweep.rung=15", "sweep.factor=2", "sweep.parallel=2"]
    sweep(tmp_path, *words, "sweep.out=whole")
    both: list[Any] = [
        Forked([*COMMAND, "-m", *SMALL, *words, "sweep.out=both"], text=True, stdout=-1, stderr=-1, cwd=tmp_path)
        for _ in range(2)
    ]
    for one in both:
        output, error = one.communicate(timeout=200)
        assert one.returncode == 0, output + error
    assert figures(tmp_path / "both") == figures(tmp_path / "whole")


@pytest.mark.campaign("network")
def test_a_population_on_object_storage(s3: str, tmp_path: Path) -> None:
    root = f"{s3}/stop-{os.getpid()}"
    words = [RATES, "steps=12", "sweep.stop=population", "sweep.rung=4", "sweep.factor=3"]
    sweep(tmp_path, *words, "sweep.out=here")
    there = sweep(tmp_path, *words, f"sweep.out={root}")
    assert "72 steps of 72" in there.stdout
    assert "[step" not in sweep(tmp_path, *words, f"sweep.out={root}").stdout
    listed = commands.run("sweep", "ls", root, cwd=tmp_path).stdout
    for name, curve in figures(tmp_path / "here").items():
        assert name in listed and f"{curve[max(curve)]:.5g}" in listed
