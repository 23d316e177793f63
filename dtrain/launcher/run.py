"""One run from its Plan on: its lease, the files that describe it, its ranks, and the report of a failure."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import yaml

from dtrain.build import build, refuse_given
from dtrain.config.facts import fact
from dtrain.config.moved import current
from dtrain.config.schema import default
from dtrain.config.structure import fault
from dtrain.config.word import cut
from dtrain.errors import DtrainError, LeaseError, StoreError, WordsError
from dtrain.launcher import Detached, detached
from dtrain.lifecycle import failure, signals
from dtrain.planned import SHAPE as PLAN
from dtrain.planned import Plan
from dtrain.result import SHAPE, Result
from dtrain.secrets import screen
from dtrain.secrets.as_json import clean
from dtrain.storage import attempts, lease, leftovers, store

NUMBERS = (
    "model", "adapter", "data", "objective", "optim", "schedule", "seed", "clip", "batch",
    "init_names",
)  # fmt: skip
"""Keys that identify a run."""
SOURCES = ("init", "fork")
"""Keys that name the run it began with."""
ELSEWHERE = ("path", "holdout_path", "cache", "workers")
"""Parts of those that do not."""
FILES = ("config.yaml", "plan.yaml", "metrics.jsonl", "events.jsonl", "result.json", "failure.json")
"""The files that a start writes at `out`."""
LOOK_SECONDS = 5.0
"""Patience with storage before anything has begun."""


def run(plan: Plan, config: str, *, first: bool = True, submitted: bool = False) -> Result | None:
    """Hold the lease of `plan.out`, write plan.yaml and `config`, its config.yaml, and launch the ranks. None if the
    run has finished by the time that the lease is free. `first`: this process is no rank other than 0 of an outer
    launcher. `submitted`: it is part of the plan's job.

    Raises LeaseError if another process runs it, and DtrainError as its launcher does; then failure.json says why.
    """
    launcher = build(plan.launcher)
    if fact(plan.launcher, "detached") and not submitted and not launcher.inside:
        return _submit(plan, config, launcher)
    with store.anchored(), lease.hold(plan.out) if first else nullcontext():
        if first and finished(plan):
            return None
        try:
            if first and submitted:
                detached.note_start(plan.out)  # which reads the failure.json of the start before
            if first:
                _describe(plan, config)
            result: Result = launcher.launch(plan)
        except DtrainError as error:
            facts = error.facts or (failure.facts_of(error, 0) if submitted else {})  # who follows the job reads them
            if first and facts:
                _leave(plan.out, facts)
            raise
        if first and not store.exists(store.join(plan.out, "plan.yaml")):  # somebody removed `out` meanwhile
            _describe(plan, config)
        if first and plan.loop != default("loop"):  # dtrain's own writes it
            text = json.dumps(clean(result.to_dict()), indent=1)
            store.write(store.join(plan.out, "result.json"), text.encode())
        if first and result.status == "spiked":
            _leave(plan.out, failure.of_spike(result))
    if result.status == "spiked":
        spiked = DtrainError(result.reason)
        spiked.facts = failure.of_spike(result)
        raise spiked
    return result


def _submit(plan: Plan, config: str, launcher: Detached) -> Result | None:
    """Follow the run's job; if it has none, write what describes the run, and submit one. The job takes the lease. A
    stop signal waits until the job is known, and then stops it.
    """
    refuse_given()
    with store.anchored(), ExitStack() as stack:
        with detached.submitting(plan.out):
            job = next(iter(launcher.jobs(plan.out)), "")
            if job:
                detached.refuse_other(plan, job)
            else:
                with lease.hold(plan.out):
                    if finished(plan):
                        return None
                    _describe(plan, config)
                    environment = detached.write(plan)
            stop = stack.enter_context(signals.noted())
            if not job:
                job = launcher.submit(plan, environment)
                detached.note_job(plan.out, plan.launcher, job)
        if launcher.detach and not stop:
            return Result("submitted", 0, None, 0.0, reason=f"job {job}")
        return detached.follow(plan, launcher, job, stop)


def _describe(plan: Plan, config: str) -> None:
    """Write config.yaml and plan.yaml, and remove the failure.json of an earlier start, and what that had only begun to
    write.
    """
    leftovers.remove_parts(plan.out, FILES)
    store.write(store.join(plan.out, "config.yaml"), config.encode())
    store.write(store.join(plan.out, "plan.yaml"), plan.document().encode())
    store.remove(store.join(plan.out, "failure.json"))


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


def finished(plan: Plan) -> Result | None:
    """The result under `out` if this run has finished there. Raises WordsError if another run is there."""
    if plan.resume == "never" or plan.out.startswith("memory://"):
        return None
    there = described(plan.out)
    if there is None:
        return None
    try:
        begun = store.children(store.join(plan.out, "checkpoints"))
    except StoreError:
        return None
    here = json.loads(json.dumps(plan.decided()))
    here["batch"], there["batch"] = here["batch"]["size"], there["batch"]["size"]
    moved = {"teacher", "tokenizer", str(fact(plan.model, "weights_at") or "teacher")}
    other = [key for key in NUMBERS if _differ(there.get(key, {}), here[key], moved)]
    other += [key for key in SOURCES if _run_of(there.get(key)) != _run_of(here[key])]
    if begun and other:
        said = ", ".join(
            f"{key} ({there.get(key, 'none')} there, {here[key]} here)" if not isinstance(here[key], dict) else key
            for key in other
        )
        raise WordsError(
            f"out={plan.out} holds a run with another {said}. {_first(there, here, other, moved)}Type out=<another "
            f"place>, {_further(plan.out, there, here, other)}."
        )
    try:
        found = json.loads(store.read(store.join(plan.out, "result.json")))
        result = None if fault(found, SHAPE) else Result(**found)
    except (StoreError, ValueError, TypeError, RecursionError):
        return None
    if result is None:
        return None
    is_done = result.step >= plan.steps or (plan.stop and result.stop == plan.stop)
    return result if result.status == "finished" and is_done else None


def other_length(plan: Plan, epochs: float | None) -> int | None:
    """The steps that the run under `out` began with, if as many `epochs` are other steps now: rows were added to its
    files. Call `finished` first.
    """
    there = described(plan.out) if epochs and plan.resume != "never" else None
    if there is None or there["steps"] == plan.steps or not store.children(store.join(plan.out, "checkpoints")):
        return None
    try:
        asked = yaml.safe_load(store.read(store.join(plan.out, "config.yaml")))
    except (StoreError, yaml.YAMLError):
        return None
    return int(there["steps"]) if isinstance(asked, dict) and asked.get("epochs") == epochs else None


def no_longer_kept(plan: Plan) -> list[str]:
    """The words by which the run under `out` kept checkpoints that `plan` will remove. Call `finished` first."""
    there = described(plan.out) if plan.resume != "never" else None
    before = (there or {}).get("checkpoint") or {}
    words = {
        name: before[name] for name in ("keep_every", "best") if before.get(name) and not plan.checkpoint.get(name)
    }
    return [f"checkpoint.{name}={value}" for name, value in words.items()]


TUNED = {"optim", "schedule", "clip"}
"""Keys that a run may change as it goes on from another."""


def _further(out: str, there: Any, here: Any, other: Collection[str]) -> str:
    """The words to type with another `out`, to begin with the weights there or to go on from its step if possible."""
    weights = f"or with {screen.typed(f'init={out}')} to start from its weights"
    alike = (there.get("optim") or {}).get("_target_") == here["optim"].get("_target_")
    if not TUNED.issuperset(other) or not alike:
        return weights
    return f"with {screen.typed(f'fork={out}')} to go on from its step with the new values, {weights}"


def described(out: str) -> dict[str, Any] | None:
    """The plan.yaml under `out`; None if there is none, or it is empty: a process was killed as it wrote it. Raises
    StoreError if it is damaged.
    """
    url = store.join(out, "plan.yaml")
    try:
        text = store.read(url)
        if not text:
            return None
        there = yaml.safe_load(text)
        wrong = fault(there, PLAN)
    except StoreError:
        return None
    except (yaml.YAMLError, ValueError, RecursionError):
        wrong = "it is not YAML"
    if wrong:
        raise StoreError.during("read", url, f"it is no plan: {wrong}", "Remove it, or type out=<another place>")
    return dict(current(there))


def trained_on(plan: Plan) -> dict[str, str]:
    """Dotted key -> fingerprint of the data that this run was trained on, if it has a position in what the words name
    now; `data` or, of a mixture, `data.of.<name>`.
    """
    try:
        known = attempts.trained_on(plan.out)
        begun = (described(plan.out) or {}).get("data") if known else None
    except StoreError:  # another check says so
        return {}
    if not known or begun != plan.decided()["data"]:
        return {}
    try:
        sources = json.loads(known)["of"]
    except (ValueError, TypeError, KeyError):
        return {"data": known}
    return {f"data.of.{name}": str(each) for name, each in sources.items()}


def _run_of(source: Any) -> str:
    """The name of the run and of the checkpoint at a URL; the folders above may have been moved."""
    run, _, checkpoint = str(source or "").rstrip("/").partition("/checkpoints/")
    return f"{run.split('/')[-1]} {checkpoint}"


def _differ(there: Any, here: Any, moved: Collection[str]) -> bool:
    """Whether two values of a plan give different numbers. The location of files does not: data, and its tokenizer, are
    identified by their fingerprint, a teacher and the weights of a model by their name and digest. `moved`: keys of
    places whose last part alone counts.
    """
    if isinstance(there, dict) and isinstance(here, dict):
        return any(_differ(*pair, moved) for pair in _pairs(there, here, moved).values())
    return bool(there != here)


def _pairs(there: Mapping[str, Any], here: Mapping[str, Any], moved: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """(there, here) of each key that both have and that counts."""
    keys = [key for key in here if key in there and key not in ELSEWHERE]
    places = {key for key in keys if key in moved and isinstance(there[key], str) and isinstance(here[key], str)}
    return {
        key: (_run_of(there[key]), _run_of(here[key])) if key in places else (there[key], here[key]) for key in keys
    }


def _first(there: Any, here: Any, other: Sequence[str], moved: Collection[str]) -> str:
    """A sentence for the first value that differs in a part of the plan; empty if there is none that both have."""
    parts = (key for key in other if isinstance(here[key], dict) and isinstance(there.get(key), dict))
    for name, one, two in (each for key in parts for each in _differences(key, there[key], here[key], moved)):
        return f"{name} is {cut(str(one))} there, {cut(str(two))} here. "
    return ""


def _differences(name: str, there: Any, here: Any, moved: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value there, value here) of each single value that differs."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key, pair in _pairs(there, here, moved).items():
            if _differ(*pair, moved):
                yield from _differences(f"{name}.{key}", there[key], here[key], moved)
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for index, pair in enumerate(zip(there, here, strict=True)):
            yield from _differences(f"{name}[{index}]", *pair, moved)
    elif there != here:
        yield name, there, here
