"""`dtrain [train] <words>`: the main job, alone or with -m once for every combination of swept values.

dtrain recipe=digits out=runs/a optim.lr=1e-3              the same words go on where it stopped
dtrain -m optim.lr=1e-3,3e-3 seed=0,1 sweep.out=runs/s     four runs, and what came of them
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import yaml

from dtrain import recipe
from dtrain.build import build
from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.compose.sweep import multirun
from dtrain.config.schema import Config
from dtrain.config.structure import fault
from dtrain.config.word import cut
from dtrain.errors import DtrainError, LeaseError, PreflightError, StoreError, WordsError, why
from dtrain.launcher import preflight, zygote
from dtrain.lifecycle import failure
from dtrain.planned import SHAPE as PLAN
from dtrain.planned import Plan
from dtrain.recipe import requires
from dtrain.resolve import resolve
from dtrain.result import SHAPE, Result, note_code
from dtrain.secrets import redact_arg, screen
from dtrain.storage import lease, store
from dtrain.verb import runs
from dtrain.verb.plan import before, show

NUMBERS = ("model", "data", "objective", "optim", "schedule", "seed", "clip", "batch")
"""Keys that identify a run."""
ELSEWHERE = ("path", "holdout_path", "cache", "workers")
"""Parts of those that do not."""
LOOK_SECONDS = 5.0
"""Patience with storage before anything has begun."""


def run(words: Sequence[str]) -> int:
    with zygote.kept():
        if "-m" in words or "--multirun" in words:
            return sweep([word for word in words if word not in ("-m", "--multirun")])
        return one(compose(words)).exit_code


def sweep(words: Sequence[str]) -> int:
    """Every job is a complete run in its own folder; a failed one does not stop the others."""
    failed, measured = list[int](), list[str]()

    def job(words: Sequence[str]) -> float | None:
        try:
            config = compose(words)
            result = one(config)
        except DtrainError as error:
            screen.complain(f"{' '.join(cut(redact_arg(word)) for word in words)}: {error}")
            failed.append(error.exit_code)
            return None
        if result.exit_code:  # asked to stop: that means the sweep, not one job
            sys.exit(result.exit_code)
        name, value = figure(config, result)
        measured.append(name)
        return value

    root = multirun(words, job, check=lambda words: resolve(compose(words), detect()))
    if measured:
        screen.say(f"the figure of a job, which a sweeper of Hydra's is told: {', '.join(dict.fromkeys(measured))}")
    runs.show(root)
    return max(failed, default=0)


def figure(config: Config, result: Result) -> tuple[str, float | None]:
    """The metric of a job of a sweep, and whether more is better: `checkpoint.best`, else the held-out loss, else the
    training loss.
    """
    for name in (config.checkpoint.get("best"), "eval_loss"):
        if name in result.metrics:
            return name, result.metrics[name]
    return "loss of training (nothing is held out)", result.loss


def one(config: Config) -> Result:
    """Decide, check, save what was decided, launch."""
    cluster = detect()
    plan = resolve(config, cluster)
    checked = [
        key
        for key, source in config.sources.items()
        if source == "command line" and key.split(".")[0] in ("verify", "expect")
    ]
    if checked:
        raise WordsError(
            *(
                f"{key} (command line): only verify looks at it. Type dtrain verify <the words>, or leave {key} out."
                for key in checked
            )
        )
    first = cluster.external is None or cluster.external.rank == 0
    finished = _finished(plan, say=first)
    if finished:
        return finished
    if plan.world > 1 and not cluster.external:
        zygote.begin()
    if first:
        requires.check(config, cluster)
        with store.patience(LOOK_SECONDS):
            preflight.check(plan)
        screen.say(f"{show(plan)}\n{before(plan)}".rstrip())
        if full := screen.full():
            raise PreflightError(f"standard output: {why(full)}. Send it elsewhere: > <another file>.")
    with store.anchored(), lease.hold(plan.out) if first else nullcontext():
        finished = (
            _finished(plan, say=first) if first else None
        )  # by whoever held the lease while this run waited for it
        if finished:
            return finished
        if first:
            note_code()
            _write_down(plan, config)
            store.remove(store.join(plan.out, "failure.json"))  # of an earlier start
        try:
            result: Result = build(plan.launcher).launch(plan)
        except DtrainError as error:
            if first and error.facts:
                _leave(plan.out, error.facts)
            raise
        if first and not store.exists(store.join(plan.out, "plan.yaml")):  # somebody removed `out` meanwhile
            _write_down(plan, config)
    if result.status == "spiked":
        raise DtrainError(result.reason)
    if first:
        screen.say(_farewell(plan, result))
    return result


def _write_down(plan: Plan, config: Config) -> None:
    store.write(store.join(plan.out, "config.yaml"), recipe.write(config).encode())
    store.write(store.join(plan.out, "plan.yaml"), plan.document().encode())


def _leave(out: str, facts: Mapping[str, Any]) -> None:
    """Write failure.json, if the storage allows it. Raises LeaseError: a run without its lease writes no more."""
    try:
        with store.patience(LOOK_SECONDS):
            lease.verify(out)
            failure.save(out, facts)
    except LeaseError:
        raise
    except StoreError as error:
        screen.complain(f"there is no failure.json: {error}")


def _finished(plan: Plan, *, say: bool) -> Result | None:
    """The result under `out` if there is nothing left to do."""
    found = _there(plan)
    if found and say:
        screen.say(
            f"already finished: {plan.out} has done {found.step} steps, loss {found.loss}. Type steps=<more> to go "
            "on, or out=<another place>."
        )
    return found


def _there(plan: Plan) -> Result | None:
    """The result under `out` if this run has finished there. Raises WordsError if another run is there."""
    if plan.resume == "never" or plan.out.startswith("memory://"):
        return None
    try:
        there = yaml.safe_load(store.read(store.join(plan.out, "plan.yaml")))
        begun = store.children(store.join(plan.out, "checkpoints"))
    except StoreError:
        return None
    except (yaml.YAMLError, ValueError, RecursionError):
        there, begun = None, []
    if wrong := fault(there, PLAN):
        raise StoreError.during(
            "read",
            store.join(plan.out, "plan.yaml"),
            f"it is no plan: {wrong}",
            "Remove it, or type out=<another place>",
        )
    here = json.loads(json.dumps(plan.decided()))
    here["batch"], there["batch"] = here["batch"]["size"], there["batch"]["size"]
    other = [key for key in NUMBERS if _differ(there.get(key), here[key])]
    if begun and other:
        said = ", ".join(
            f"{key} ({there.get(key, 'none')} there, {here[key]} here)" if not isinstance(here[key], dict) else key
            for key in other
        )
        raise WordsError(
            f"out={plan.out} holds a run with another {said}. Type out=<another place>, or init={plan.out} to start "
            "from its weights."
        )
    try:
        found = json.loads(store.read(store.join(plan.out, "result.json")))
        result = None if fault(found, SHAPE) else Result(**found)
    except (StoreError, ValueError, TypeError, RecursionError):
        return None
    if result is None:
        return None
    return result if result.status == "finished" and result.step >= plan.steps else None


def _differ(there: Any, here: Any) -> bool:
    """Whether two values of a plan give different numbers. The location of files does not: data is identified by its
    fingerprint.
    """
    if isinstance(there, dict) and isinstance(here, dict):
        return any(_differ(there[key], here[key]) for key in there.keys() & here.keys() - set(ELSEWHERE))
    return bool(there != here)


def _farewell(plan: Plan, result: Result) -> str:
    loss = "" if result.loss is None else f", last step's loss {result.loss:.4f}"
    held = "".join(f", held-out {name.removeprefix('eval_')} {value:.4f}" for name, value in result.metrics.items())
    line = screen.on_one_line(
        f"{result.status} after {result.step} steps in {result.wall_seconds:.1f} s{loss}{held} · {plan.out}"
    )
    return line if result.status == "finished" else f"{line}\ngo on with the same words and out={plan.out}"
