"""Searches without jobs: their trials are files, and whatever is killed, one seed draws the same ones."""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain.sweep import drawing, folder, sobol, trials
from dtrain.sweep.drawing import sampler_of
from dtrain.sweep.folder import Job
from dtrain.sweep.proposer import Ended
from dtrain.sweep.search import Search
from dtrain.sweep.space import Axis, Choices, Interval
from dtrain.sweep.study import Study

AXES = (
    Interval("x", 1e-4, 1.0, log=True, whole=False),
    Interval("y", 0.0, 1.0, log=False, whole=False),
    Interval("n", 1, 64, log=True, whole=True),
    Choices("kind", ("a", "b", None)),
)
METHODS = ("random", "sobol", "tpe", "cmaes", "nsga2")
Function = Callable[[Mapping[str, Any]], tuple[float, ...]]


def known(values: Mapping[str, Any]) -> tuple[float, ...]:
    distance = (math.log10(values["x"]) + 2) ** 2 + (values["y"] - 0.3) ** 2 + (math.log2(values["n"]) - 3) ** 2 / 4
    return (distance + (values["kind"] != "a"),)


def study(method: str, trials: int, seed: int = 0, **more: Any) -> Study:
    metrics = ("eval_loss", "other") if method == "nsga2" else ("eval_loss",)
    return Study(method, seed, trials, metrics, ("min",) * len(metrics), **{"ahead": 4, **more})


def opened(root: Path, of: Study, axes: Sequence[Axis] = AXES, conditions: Any = None) -> Search:
    """A worker that begins now."""
    depends = conditions or {}

    def make(values: Mapping[str, Any]) -> Job:
        there = {key: value for key, value in values.items() if drawing_exists(key, values, depends)}
        return Job(there, (), folder.name_of(there, "1f3a9c02"))

    past = trials.every(str(root), axes)
    states = folder.states(str(root), [Job({}, (), trial.job) for trial in past])
    return Search(
        str(root),
        of,
        sampler_of(of, axes, depends),
        lambda number: trials.read(str(root), number, axes),
        make,
        [(trial, states[trial.job]) for trial in past],
    )


def drawing_exists(key: str, values: Mapping[str, Any], conditions: Any) -> bool:
    group, words = conditions.get(key, ("", ()))
    return not group or values[group] in words


def finish(root: Path, search: Search, job: Job, losses: Sequence[float]) -> None:
    """What a job leaves, and what the engine tells."""
    metrics = dict(zip(("eval_loss", "other"), losses, strict=False))
    result = {"status": "finished", "step": 1, "loss": losses[0], "wall_seconds": 1.0, "metrics": metrics}
    (root / job.name).mkdir(exist_ok=True)
    (root / job.name / "result.json").write_text(json.dumps(result))
    search.tell(job, Ended("finished", loss=losses[0], metrics=metrics))


def played(
    root: Path,
    of: Study,
    function: Function = known,
    *,
    slots: int = 2,
    chance: random.Random | None = None,
    kills: int = 0,
    **more: Any,
) -> list[dict[str, Any]]:
    """The values of all trials of a search whose jobs end in a random order, and which is killed that often."""
    chance, search, running = chance or random.Random(0), opened(root, of, **more), list[Job]()
    while running or not search.is_done():
        if kills and chance.random() < 0.2:
            kills, search, running = kills - 1, opened(root, of, **more), []
        while len(running) < slots and (job := search.next()):
            running.append(job)
        if running:
            job = running.pop(chance.randrange(len(running)))
            finish(root, search, job, function(job.values))
    assert not kills
    return [dict(trial.values) for trial in trials.every(str(root), more.get("axes", AXES))]


@pytest.mark.parametrize("method", METHODS)
def test_one_seed_draws_the_same_trials_whatever_was_killed_and_whatever_was_quick(method: str, tmp_path: Path) -> None:
    function = (lambda values: (known(values)[0], values["y"])) if method == "nsga2" else known
    drawn = []
    for number, kills in enumerate((0, 6, 3)):
        root = tmp_path / str(number)
        root.mkdir()
        drawn.append(played(root, study(method, 50), function, chance=random.Random(number), kills=kills))
    assert drawn[0] == drawn[1] == drawn[2]
    assert len({str(values) for values in drawn[0]}) == 50
    (tmp_path / "other").mkdir()
    assert played(tmp_path / "other", study(method, 5, seed=1), function) != drawn[0][:5]


def test_two_workers_share_the_trials_and_no_number_is_drawn_twice(tmp_path: Path) -> None:
    of = study("tpe", 30)
    workers, began, running = [opened(tmp_path, of), opened(tmp_path, of)], list[str](), list[tuple[Search, Job]]()
    chance = random.Random(0)
    while not all(worker.is_done() for worker in workers):
        worker = chance.choice(workers)
        job = worker.next()
        if job and job.name in began:  # as the engine sees by its lease
            worker.tell(job, Ended("elsewhere"))
        elif job:
            began.append(job.name)
            running.append((worker, job))
        elif running:
            worker, job = running.pop(chance.randrange(len(running)))
            finish(tmp_path, worker, job, known(job.values))
    assert len(began) == len(set(began)) == 30
    assert len(trials.every(str(tmp_path), AXES)) == 30


def test_a_worker_waits_for_its_own_jobs_and_not_for_those_of_others(tmp_path: Path) -> None:
    search = opened(tmp_path, study("tpe", 30, ahead=3))
    mine = [search.next() for _ in range(3)]
    assert all(mine) and search.next() is None and not search.is_done()
    assert mine[0]
    search.tell(mine[0], Ended("elsewhere"))
    assert search.next() is not None and search.next() is None


def test_the_points_to_begin_with_come_first_and_the_rest_of_them_is_drawn(tmp_path: Path) -> None:
    begin = ({"x": 0.5, "kind": "b"}, {"y": 0.25})
    drawn = played(tmp_path, study("random", 5, begin=begin))
    assert drawn[0]["x"] == 0.5 and drawn[0]["kind"] == "b" and drawn[1]["y"] == 0.25
    assert all(set(values) == {"x", "y", "n", "kind"} for values in drawn)


@pytest.mark.parametrize("method", METHODS)
def test_a_key_exists_only_in_trials_with_the_word_that_has_it(method: str, tmp_path: Path) -> None:
    axes = [
        Interval("optim.momentum", 0.0, 1.0, log=False, whole=False),
        Interval("optim.lr", 1e-4, 1.0, log=True, whole=False),
        Interval("seed", 0, 9, log=False, whole=True),
        Choices("optim", ("sgd", "adamw")),
    ]
    conditions = {"optim.momentum": ("optim", frozenset({"sgd"}))}
    drawn = played(
        tmp_path,
        study(method, 40),
        lambda values: (values["optim.lr"], values.get("optim.momentum", 0.5)),
        axes=axes,
        conditions=conditions,
    )
    assert {values["optim"] for values in drawn} == {"sgd", "adamw"}
    assert all(("optim.momentum" in values) == (values["optim"] == "sgd") for values in drawn)


def test_a_job_that_failed_is_the_worst_and_one_that_was_stopped_has_not_ended(tmp_path: Path) -> None:
    search = opened(tmp_path, study("tpe", 20, ahead=2))
    first, second = search.next(), search.next()
    assert first and second
    search.tell(first, Ended("stopped"))
    assert search.next() is None
    search.tell(first, Ended("failed", kind="error"))
    third = search.next()
    assert third
    finish(tmp_path, search, second, [float("nan")])
    finish(tmp_path, search, third, [3.0])
    assert search._trials[0].losses == search._trials[1].losses == (math.inf,)
    assert [trial.job for trial in trials.unbeaten(search._trials)] == [third.name]


def test_of_two_workers_one_alone_draws_a_number(tmp_path: Path) -> None:
    drawn = ({"x": value, "y": 0.5, "n": 2, "kind": "a"} for value in (0.25, 0.5))
    one, other = (trials.Trial(0, values, folder.name_of(values, "1f3a9c02")) for values in drawn)
    assert trials.record(str(tmp_path), one) and not trials.record(str(tmp_path), other)
    (found,) = trials.every(str(tmp_path), AXES)
    assert found == one


def test_a_small_space_is_drawn_without_repetition_and_then_again_without_a_job(tmp_path: Path) -> None:
    axes = [Choices("a", (1, 2, 3)), Choices("b", ("x", "y"))]
    few = played(tmp_path, study("random", 6), lambda values: (1.0,), axes=axes)
    assert len({str(values) for values in few}) == 6
    (tmp_path / "tpe").mkdir()
    played(tmp_path / "tpe", study("tpe", 12), lambda values: (values["a"],), axes=axes)
    jobs = {trial.job for trial in trials.every(str(tmp_path / "tpe"), axes)}
    assert len(jobs) == 6 == len([*(tmp_path / "tpe").glob("*/result.json")])


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.key)
def test_values_are_spread_over_the_axis_and_are_the_same_when_typed_again(axis: Axis) -> None:
    values = [drawing.at(axis, number / 1000) for number in range(1001)]
    if isinstance(axis, Choices):
        assert [values.count(value) for value in axis.values] == [334, 333, 334]
        return
    assert (values[0], values[-1]) == (axis.low, axis.high) and values == sorted(values)
    assert all(float(f"{value:.6g}") == value for value in values)
    assert all(abs(drawing.position(axis, value) - number / 1000) < 0.5 for number, value in enumerate(values))
    middle = values[500]
    assert middle == {"x": 0.01, "y": 0.5, "n": 6}[axis.key]
    assert drawing.at(axis, drawing.position(axis, middle)) == middle


def test_the_sobol_sequence_is_that_of_torch() -> None:
    keys = [Interval(str(number), 0.0, 1.0, log=False, whole=False) for number in range(21)]
    directions = [sobol._directions(*sobol.DIRECTIONS[place]) for place in range(len(keys))]
    mine = [[sobol.point(number, each) / 2**sobol.BITS for each in directions] for number in range(256)]
    theirs = torch.quasirandom.SobolEngine(len(keys)).draw(256, dtype=torch.float64)
    assert mine == theirs.tolist()


def test_every_part_of_the_space_gets_its_share_of_a_sobol_search(tmp_path: Path) -> None:
    drawn = played(tmp_path, study("sobol", 32))
    quarters = [[int(drawing.position(axis, values[axis.key]) * 4) for values in drawn] for axis in AXES[:2]]
    assert all([each.count(quarter) for quarter in range(4)] == [8] * 4 for each in quarters)


@pytest.mark.parametrize("method", ["cmaes", "tpe"])
def test_a_search_comes_closer_than_random(method: str, tmp_path: Path) -> None:
    axes = AXES[:2]

    def distance(values: Mapping[str, Any]) -> tuple[float]:
        return ((math.log10(values["x"]) + 2) ** 2 + 4 * (values["y"] - 0.3) ** 2,)

    closest = dict[str, list[float]]()
    for name in ("random", method):
        for seed in range(3):
            root = tmp_path / f"{name}-{seed}"
            root.mkdir()
            drawn = played(root, study(name, 60, seed), distance, axes=axes)
            closest.setdefault(name, []).append(min(distance(values)[0] for values in drawn))
    assert sum(closest[method]) < sum(closest["random"]) / 4


@pytest.mark.slow
def test_tpe_beats_random_in_18_of_20_seeds(tmp_path: Path) -> None:
    """After 100 trials, four at a time and killed on the way, of a function of five keys, one of them a list."""
    axes = [*AXES, Interval("momentum", 0.0, 1.0, log=False, whole=False)]

    def function(values: Mapping[str, Any]) -> tuple[float]:
        return (known(values)[0] + 4 * (values["momentum"] - 0.8) ** 2,)

    wins = 0
    for seed in range(20):
        lowest = {}
        for method in ("tpe", "random"):
            root = tmp_path / f"{method}-{seed}"
            root.mkdir()
            drawn = played(root, study(method, 100, seed, ahead=8), function, slots=4, kills=3, axes=axes)
            lowest[method] = min(function(values) for values in drawn)
        wins += lowest["tpe"] < lowest["random"]
    assert wins >= 18


def test_nsga2_gives_a_front(tmp_path: Path) -> None:
    """Of x^2 and (x - 1)^2 the best are all x from 0 to 1."""
    axes = [Interval("x", -10.0, 10.0, log=False, whole=False), Interval("y", -10.0, 10.0, log=False, whole=False)]

    def both(values: Mapping[str, Any]) -> tuple[float, float]:
        return values["x"] ** 2 + values["y"] ** 2, (values["x"] - 1) ** 2 + values["y"] ** 2

    volumes = dict[str, list[float]]()
    for name in ("random", "nsga2"):
        for seed in range(3):
            root = tmp_path / f"{name}-{seed}"
            root.mkdir()
            points = [both(values) for values in played(root, study(name, 150, seed), both, axes=axes)]
            volumes.setdefault(name, []).append(volume(points, 2.0))
    assert sum(volumes["nsga2"]) > 1.5 * sum(volumes["random"])
    ended = opened(tmp_path / "nsga2-0", study("nsga2", 150), axes)._trials
    front = [trial.losses or () for trial in trials.unbeaten(ended)]
    assert not [one for one in front for other in ended if trials.beats(other, trials.Trial(0, {}, "", one))]
    assert len(front) >= 3
    assert [second for _, second in sorted(front)] == sorted((second for _, second in front), reverse=True)


def volume(points: Sequence[tuple[float, float]], reference: float) -> float:
    """The area that is worse than some point and better than the reference."""
    area, low = 0.0, reference
    for first, second in sorted(points):
        if first < reference and second < low:
            area, low = area + (reference - first) * (low - second), second
    return area


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "no trial of this search"),
        ('{"values": {}}', "has no job"),
        ('{"job": "../x", "values": {}}', "no folder of a job"),
        ('{"job": "..", "values": {}}', "no folder of a job"),
        ('{"job": "a", "values": {"trust": "os"}}', "trust has no such value"),
        ('{"job": "a", "values": {"x": 7.5}}', "x has no such value"),
        ('{"job": "a", "values": {"x": true}}', "x has no such value"),
        ('{"job": "a", "values": {"kind": ["a"]}}', "kind has no such value"),
        ('{"job": "a", "values": {}}', "it has no value of x"),
        ('{"job": "b-1", "values": {"x": 0.1, "y": 0.5, "n": 4, "kind": "a"}}', "b-1 is not the folder of its values"),
    ],
)
def test_a_trial_that_the_search_cannot_have_drawn_is_refused(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "00000.json").write_text(text)
    with pytest.raises(Exception, match=sentence):
        trials.every(str(tmp_path), AXES)
