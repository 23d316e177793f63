"""Which jobs go on after a rung: decided from the files of the jobs, by any worker, in whatever order they end."""

import json
import math
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dtrain.sweep import stop
from dtrain.sweep.folder import Job
from dtrain.sweep.history import Curves
from dtrain.sweep.population import explored
from dtrain.sweep.proposer import Ended, Listed
from dtrain.sweep.rungs import FEWEST, first_rung, halving, median, rungs
from dtrain.sweep.space import Choices, Interval
from dtrain.sweep.stopping import Stopping
from dtrain.sweep.study import Study

STEPS, AXES = 64, (Choices("optim.lr", tuple(2.0**-power for power in range(16))),)


def study_of(rule: str, rung: int, **more: Any) -> Study:
    return Study(metrics=("eval_loss",), goals=("min",), stop=rule, rung=rung, **{"factor": 4, **more})


def grid() -> list[Job]:
    return [
        Job({"optim.lr": lr}, (f"optim.lr={lr}",), f"lr-{lr}-{number:08x}") for number, lr in enumerate(AXES[0].values)
    ]


def born(values: Mapping[str, Any], parent: Job, step: int) -> Job:
    name = f"lr-{values['optim.lr']}-of-{parent.name}-at-{step}"
    return Job(values, ("optim.lr",), name, parent=(parent.name, step))


class Sweep:
    """A folder of jobs that train by writing what a run writes, and the commands that work on it."""

    def __init__(self, root: Path, rule: str, rung: int, **more: Any) -> None:
        self.root, self.study = root, study_of(rule, rung, **more)
        self.steps = 0

    def command(self) -> Stopping:
        jobs = stop.in_order(grid(), self.study)
        return stop.proposer(str(self.root), self.study, STEPS, Listed(jobs), len(jobs), AXES, born)

    def state(self, job: Job) -> tuple[int, float]:
        """The steps of a job's checkpoint, and a number that training has moved."""
        place = self.root / job.name / "checkpoint"
        if place.exists():
            return tuple(json.loads(place.read_text()))  # type: ignore[return-value]
        if job.parent:
            parent, step = job.parent
            return step, json.loads((self.root / parent / f"at-{step}").read_text())
        return 0, 5.0

    def run(self, job: Job, *, lost: bool = False) -> Ended:
        """Train to the stop; `lost`: it is killed before it has written how it ended."""
        step, loss = self.state(job)
        until, lr = job.until or STEPS, job.values["optim.lr"]
        self.steps += until - step
        for _ in range(step, until):
            loss -= 0.1 * lr * (1.0 if lr < 0.3 else -0.5) * loss
        folder = self.root / job.name
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "checkpoint").write_text(json.dumps([until, loss]))
        (folder / f"at-{until}").write_text(json.dumps(loss))
        status = "finished" if until == STEPS else "stopped"
        if not lost:
            with (folder / "events.jsonl").open("a") as file:
                for event in ({"event": "evaluated", "eval_loss": loss}, {"event": status, "loss": None}):
                    file.write(json.dumps({**event, "step": until}) + "\n")
        return Ended(status, step=until, metrics={"eval_loss": loss})  # type: ignore[arg-type]

    def work(self, *, slots: int, seed: int = 0, kills: int = 0) -> None:
        """Let a command run all jobs, `slots` at a time, and end in any order; `kills`: so many commands are killed."""
        chance, command, running = random.Random(seed), self.command(), list[Job]()
        while not command.is_done():
            while len(running) < slots and (job := command.next()):
                running.append(job)
            ending = running.pop(chance.randrange(len(running)))
            if kills and chance.random() < 0.2:
                kills -= 1
                self.run(ending, lost=chance.random() < 0.5)
                command, running = self.command(), []
                continue
            command.tell(ending, self.run(ending))

    def reached(self) -> dict[str, dict[int, float]]:
        curves = Curves(str(self.root), lambda figures, loss: figures["eval_loss"])
        return {place.name: curves[place.name] for place in self.root.iterdir()}


@pytest.mark.parametrize("rule", ["halving", "median", "population"])
def test_no_kill_no_order_and_no_number_of_slots_changes_who_goes_on(rule: str, tmp_path: Path) -> None:
    whole = Sweep(tmp_path / "whole", rule, 4)
    whole.work(slots=1)
    wanted = whole.reached()
    assert {STEPS} == {max(curve) for curve in wanted.values() if STEPS in curve}
    assert any(STEPS not in curve for curve in wanted.values())
    for seed in (0, 2, 5, 7):
        other = Sweep(tmp_path / str(seed), rule, 4)
        other.work(slots=1 + seed % 4, seed=seed, kills=seed)
        assert other.reached() == wanted, seed


def test_a_finished_sweep_proposes_nothing_again(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "halving", 4)
    sweep.work(slots=2)
    steps, command = sweep.steps, sweep.command()
    assert command.next() is None and command.is_done()
    assert command.report() == f"1 of 16 jobs are finished, 15 stopped early: {steps:,} steps of 1,024"
    assert steps == 16 * 4 + 4 * 12 + 1 * 48


def test_halving_finds_the_best_of_a_grid_and_the_median_stops_the_worse_half(tmp_path: Path) -> None:
    losses = {}
    for job in grid():
        losses[job.name] = Sweep(tmp_path / "alone", "none", 0).run(job).metrics["eval_loss"]
    best = min(losses, key=lambda name: losses[name])
    for rule in ("halving", "median"):
        sweep = Sweep(tmp_path / rule, rule, 4)
        sweep.work(slots=3)
        finished = [name for name, curve in sweep.reached().items() if STEPS in curve]
        assert best in finished and len(finished) < 12


def test_a_member_of_a_population_that_gives_way_is_replaced_from_the_checkpoint_of_a_better_one(
    tmp_path: Path,
) -> None:
    sweep = Sweep(tmp_path, "population", 16)
    sweep.work(slots=3)
    curves = sweep.reached()
    children = {name: curve for name, curve in curves.items() if "-of-" in name}
    assert len(children) == 3 * 4 and sweep.steps == 16 * STEPS, "the steps of as many jobs without it"
    for name, curve in children.items():
        parent, _, step = name.partition("-of-")[2].rpartition("-at-")
        there = sorted(losses[int(step)] for losses in curves.values() if int(step) in losses)
        assert curves[parent][int(step)] <= there[3]
        assert min(curve) > int(step)


def test_a_job_does_not_go_on_before_its_checkpoint_was_taken(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "population", 16)
    command = sweep.command()
    for _ in range(16):
        job = command.next()
        assert job
        command.tell(job, sweep.run(job))
    second = []
    while job := command.next():
        second.append(job)
    parents = {job.parent[0] for job in second if job.parent}
    assert len([job for job in second if job.parent]) == 4
    assert not parents & {job.name for job in second}
    for job in second:
        command.tell(job, sweep.run(job))
    last = []
    while job := command.next():
        last.append(job)
    assert parents <= {job.name for job in last if job.until == 32}


def test_a_job_that_fails_is_the_worst_and_is_not_tried_twice_by_one_command(tmp_path: Path) -> None:
    for rule in ("halving", "median", "population"):
        sweep = Sweep(tmp_path / rule, rule, 16)
        command, tried = sweep.command(), list[str]()
        while not command.is_done():
            job = command.next()
            assert job
            bad = job.values["optim.lr"] > 0.2 and not job.parent
            tried += [job.name] if bad else []
            command.tell(job, Ended("failed", 1, "error", "planned") if bad else sweep.run(job))
        assert len(tried) == 3 == len(set(tried))
        finished = sum(STEPS in curve for curve in sweep.reached().values())
        assert command.report().startswith(f"{finished} of ") and "goes on" not in command.report()
        assert any(STEPS in curve for curve in sweep.reached().values())


def test_a_job_that_was_asked_to_stop_waits_for_the_next_command(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, "halving", 4)
    command, job = sweep.command(), None
    while job := command.next():
        command.tell(job, Ended("stopped", 130))
    assert command.is_done() and command.report() == (
        "0 of 16 jobs are finished, 0 stopped early: 0 steps of 1,024; the same command goes on"
    )
    sweep.work(slots=2)
    assert sum(STEPS in curve for curve in sweep.reached().values()) == 1


def test_the_best_so_far_counts_at_a_rung_where_it_is_asked_but_not_for_weights_that_go_on(tmp_path: Path) -> None:
    """Of a population, whose members begin with the weights of a rung, and of two metrics, which are those of one state."""
    (tmp_path / "job").mkdir()
    best = {"eval_loss": {"value": 0.5, "step": 2}}
    events = [{"event": "evaluated", "step": 4, "eval_loss": 2.0, "best": best}, {"event": "stopped", "step": 4}]
    (tmp_path / "job" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    losses = {
        best: Curves(str(tmp_path), lambda figures, loss: figures["eval_loss"], best=best)["job"][4]
        for best in (True, False)
    }
    assert losses == {True: 0.5, False: 2.0}
    two = Study(metrics=("eval_loss", "eval_accuracy"), goals=("min", "max"))
    assert two.losses({"eval_loss": 0.5, "eval_accuracy": 0.9}, None, {"eval_loss": 2.0, "eval_accuracy": 0.8}) == (
        2.0,
        -0.8,
    )


def test_what_another_worker_did_is_read_from_its_files(tmp_path: Path) -> None:
    """The engine tells how far the job is; of a job beyond its rung the losses before are in its journal."""
    sweep, other = Sweep(tmp_path, "halving", 4), Sweep(tmp_path, "halving", 4)
    command = sweep.command()
    first = command.next()
    assert first and first.until == 4
    command.tell(first, Ended("elsewhere"))
    for until in (4, 16):
        ended = other.run(replace(first, until=until))
    command.tell(first, ended)
    mine = list[str]()
    while not command.is_done():
        job = command.next()
        assert job
        mine += [job.name] if job.until == 4 else []
        command.tell(job, sweep.run(job))
    assert first.name not in mine and len(mine) == 15


def test_a_job_that_had_finished_before_stands_where_it_is(tmp_path: Path) -> None:
    """And a journal that was removed, or cut in the middle of a row, only costs the rungs again."""
    sweep = Sweep(tmp_path, "halving", 4)
    job = grid()[3]
    sweep.run(job)
    journal = tmp_path / job.name / "events.jsonl"
    journal.write_text(journal.read_text() + '{"event": "evaluated", "step": 7, "eval')
    sweep.work(slots=2)
    assert list(sweep.reached()[job.name]) == [STEPS]
    other = tmp_path / grid()[9].name
    shutil.rmtree(other)
    sweep.work(slots=2)
    assert list(sweep.reached()[other.name]) == [4]


def test_rungs() -> None:
    assert rungs("halving", steps=1000, rung=63, factor=4) == (63, 252, 1000)
    assert rungs("median", steps=10, rung=4, factor=4) == (4, 8, 10)
    assert first_rung("halving", steps=1000, jobs=64, factor=4) == 63
    assert first_rung("halving", steps=1000, jobs=8, factor=4) == 250
    assert first_rung("halving", steps=3, jobs=64, factor=4) == 0
    assert first_rung("population", steps=1000, jobs=8, factor=4) == 100
    for steps in range(2, 40):
        assert 0 < first_rung("median", steps=steps, jobs=8, factor=4) < steps


def test_halving_lets_go_on_who_cannot_be_displaced_any_more() -> None:
    names = [f"{number}" for number in range(8)]
    curves = {name: {10: float(name)} if name in "0145" else {} for name in names}
    assert halving(names, curves, (10, 100), factor=2, total=8) == dict.fromkeys(names, 10), "4 may be better"
    curves["7"] = {10: 7.0}
    assert halving(names, curves, (10, 100), factor=2, total=8)["0"] == 100
    assert halving(names, curves, (10, 100), factor=2, total=8)["1"] == 10
    curves |= {"2": {10: math.inf}, "3": {10: math.inf}, "6": {10: math.inf}}
    goals = halving(names, curves, (10, 100), factor=2, total=8)
    assert [name for name, goal in goals.items() if goal == 100] == ["0", "1", "4", "5"]


def test_the_median_compares_with_the_jobs_before() -> None:
    names = [f"{number}" for number in range(FEWEST + 2)]
    curves = {name: {1: 1.0 + number, 2: 1.0} for number, name in enumerate(names)}
    goals = median(names, curves, (1, 2, 3))
    assert goals["0"] == 3 and goals[names[FEWEST - 1]] == 3, "too few to compare with"
    assert goals[names[-1]] == goals[names[-2]] == 1
    del curves["2"][1], curves["2"][2]
    assert {median(names, curves, (1, 2, 3))[name] for name in names[2:]} == {1}, "they wait for it"


def test_a_population_moves_to_the_next_value_or_by_a_fifth() -> None:
    space = [Choices("a", (3, 1, 2)), Choices("b", ("x", "y", "z")), Choices("c", (1,))]
    space += [Interval("d", 1e-3, 1.0, log=True, whole=False), Interval("e", 1, 9, log=False, whole=True)]  # type: ignore[list-item]
    seen = [explored({"a": 1, "b": "y", "c": 1, "d": 1.0, "e": 2}, space, random.Random(seed)) for seed in range(40)]
    assert {key: {values[key] for values in seen} for key in "abcde"} == {
        "a": {2}, "b": {"x", "z"}, "c": {1}, "d": {0.8}, "e": {1, 3},
    }  # fmt: skip
