"""`dtrain [train] <words>`: the main job, alone or with -m once for every combination of swept values."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dtrain import preflight, recipe, store
from dtrain.build import build
from dtrain.cluster import look
from dtrain.compose import compose, multirun
from dtrain.config import Config
from dtrain.errors import DtrainError, StoreError, WordsError
from dtrain.plan import Plan
from dtrain.resolve import resolve
from dtrain.result import Result
from dtrain.verb.plan import show

NUMBERS = ("model", "data", "objective", "optim", "schedule", "precision", "seed", "clip", "batch.size")
"""What makes a finished run another run."""


def run(words: Sequence[str]) -> int:
    if "-m" in words or "--multirun" in words:
        return sweep([word for word in words if word not in ("-m", "--multirun")])
    result = one(compose(words))
    return result.exit_code


def sweep(words: Sequence[str]) -> int:
    """Every job is a complete run in its own folder; a failed one does not stop the others."""
    failed: list[int] = []

    def job(words: Sequence[str]) -> float | None:
        try:
            result = one(compose(words))
        except DtrainError as error:
            print(f"dtrain: {' '.join(words)}: {error}", file=sys.stderr, flush=True)
            failed.append(error.exit_code)
            return None
        if result.exit_code:  # asked to stop: that means the sweep, not one job
            sys.exit(result.exit_code)
        return result.loss

    multirun(words, job, check=lambda words: resolve(compose(words), look()))
    return max(failed, default=0)


def one(config: Config) -> Result:
    """Decide, check, save what was decided, launch."""
    cluster = look()
    plan = resolve(config, cluster)
    first = cluster.external is None or cluster.external.rank == 0
    if first:
        finished = _finished(plan)
        if finished:
            print(
                f"already finished: {plan.out} has done {finished.step} steps, loss {finished.loss}. Type steps=<more> to go on, or out=<another place>."
            )
            return finished
        preflight.check(plan)
        print(show(plan), flush=True)
        store.write(store.join(plan.out, "config.yaml"), recipe.write(config).encode())
        store.write(store.join(plan.out, "plan.yaml"), yaml.safe_dump(plan.to_dict(), sort_keys=False).encode())
    result: Result = build(plan.launcher).launch(plan)
    if first:
        print(_farewell(plan, result), flush=True)
    return result


def _finished(plan: Plan) -> Result | None:
    """The result of a finished run under `out`, if it was this one. Raises WordsError when it was another."""
    if plan.resume == "never" or plan.out.startswith("memory://"):
        return None
    try:
        result = Result(**json.loads(store.read(store.join(plan.out, "result.json"))))
        there = yaml.safe_load(store.read(store.join(plan.out, "plan.yaml")))
    except (StoreError, ValueError, TypeError):
        return None
    if result.status != "finished" or result.step < plan.steps:
        return None
    here = plan.to_dict()
    other = [key for key in NUMBERS if _at(there, key) != _at(here, key)]
    if other:
        raise WordsError(f"out={plan.out} holds a finished run with another {', '.join(other)}. Type out=<another place>.")
    return result


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for name in key.split("."):
        value = value[name]
    return json.loads(json.dumps(value))


def _farewell(plan: Plan, result: Result) -> str:
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    held = "".join(f", {name.removeprefix('eval_')} {value:.4f} held out" for name, value in result.metrics.items())
    line = f"{result.status} after {result.step} steps in {result.wall_seconds:.1f} s{loss}{held} · {plan.out}"
    return line if result.status == "finished" else f"{line}\ngo on with the same words and out={plan.out}"
