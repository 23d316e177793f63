"""What a search costs and what it finds, without jobs: trials and results are files, as a sweep leaves them.

OMP_NUM_THREADS=1 python tests/bench/searches.py [--trials 1000] [--seeds 20]
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.sweep import folder, trials
from dtrain.sweep.drawing import sampler_of
from dtrain.sweep.folder import Job
from dtrain.sweep.search import Search
from dtrain.sweep.space import Axis, Choices, Interval
from dtrain.sweep.study import Study
from dtrain.sweep.trials import Trial

AXES: tuple[Axis, ...] = (
    Interval("lr", 1e-4, 1.0, log=True, whole=False),
    Interval("momentum", 0.0, 1.0, log=False, whole=False),
    Interval("clip", 0.0, 1.0, log=False, whole=False),
    Interval("width", 1, 64, log=True, whole=True),
    Choices("kind", ("a", "b", "c")),
)
METHODS = ("random", "sobol", "tpe", "cmaes", "nsga2")


def known(values: Mapping[str, Any]) -> float:
    return float(
        (math.log10(values["lr"]) + 2) ** 2
        + 4 * (values["momentum"] - 0.8) ** 2
        + (values["clip"] - 0.3) ** 2
        + (math.log2(values["width"]) - 3) ** 2 / 4
        + (values["kind"] != "a")
    )


def study(method: str, count: int, seed: int = 0) -> Study:
    metrics = ("eval_loss", "other")[: 1 + (method == "nsga2")]
    return Study(method, seed, count, metrics, ("min",) * len(metrics), (), 6)


def drawn(method: str, count: int, seed: int) -> list[Trial]:
    """The trials of a search of six jobs at a time, in memory."""
    of, past = study(method, count, seed), list[Trial]()
    sampler = sampler_of(of, AXES, {})
    for number in range(count):
        seen = [trial if trial.number <= number - of.ahead else _running(trial) for trial in past]
        values = sampler.draw(number, 0, seen)
        past.append(
            Trial(number, values, folder.name_of(values, "0"), (known(values), values["clip"])[: len(of.metrics)])
        )
    return past


def _running(trial: Trial) -> Trial:
    return Trial(trial.number, trial.values, trial.job)


def of_replay(method: str, count: int) -> tuple[float, float]:
    """Seconds to open a search of so many finished trials, and for each trial that it then draws."""
    past = drawn("random", count, 0)
    with tempfile.TemporaryDirectory() as place:
        for trial in past:
            trials.record(place, trial)
            (Path(place) / trial.job).mkdir()
            metrics = {"eval_loss": known(trial.values), "other": trial.values["clip"]}
            result = {"status": "finished", "step": 1, "loss": 1.0, "wall_seconds": 1.0, "metrics": metrics}
            (Path(place) / trial.job / "result.json").write_text(json.dumps(result))
        began = time.process_time()
        there = trials.every(place, AXES)
        states = folder.states(place, [Job({}, (), trial.job) for trial in there])
        of = study(method, count + 1000)
        search = Search(
            place, of, sampler_of(of, AXES, {}), lambda number: None, lambda values: Job(values, (), folder.name_of(values, "0")),
            [(trial, states[trial.job]) for trial in there],
        )  # fmt: skip
        first = search.next()
        opened = time.process_time() - began
        asks = []
        for _ in range(of.ahead - 1):
            began = time.process_time()
            assert first and search.next()
            asks.append(time.process_time() - began)
        return opened, statistics.median(asks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=20)
    asked = parser.parse_args()
    print("| search | opened with 100 trials, ms | a draw | with 1,000 | a draw |")
    for method in METHODS:
        pairs = [of_replay(method, count) for count in (100, asked.trials)]
        print(f"| `{method}` | " + " | ".join(f"{1e3 * value:.1f}" for pair in pairs for value in pair) + " |")
    random = [min(known(trial.values) for trial in drawn("random", 60, seed)) for seed in range(asked.seeds)]
    for method in METHODS[:4]:
        lowest = [min(known(trial.values) for trial in drawn(method, 60, seed)) for seed in range(asked.seeds)]
        wins = sum(one < other for one, other in zip(lowest, random, strict=True))
        print(f"{method}: median {statistics.median(lowest):.3g} after 60 trials, better than random in {wins} seeds")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
