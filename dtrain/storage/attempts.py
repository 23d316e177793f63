"""The save attempts under a run's `out`, read from folder names alone: which exist, and in which order they were
written.

    <out>/checkpoints/step-00000100/00000003-20260101T000000-0123abcd-0001/

The name of an attempt begins with the lease number of its run. A new lease gets a number above every existing lease and
attempt, so a later run's attempts sort as newer, regardless of their step and of any clock.
"""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from dtrain.errors import StoreError
from dtrain.storage import store

COMMIT, IMPORTED = "COMMIT.json", "imported.yaml"
"""An attempt with the first is a committed checkpoint; a folder with the second holds weights of others."""
SCORES = "METRICS.json"
"""Name of the file with metrics beside a commit."""
BEST = "/best"
"""`<run>/best` is the name of the best checkpoint of a run; nothing lies there."""
STEP = re.compile(r"step-([0-9]{8,15})")
ATTEMPT = re.compile(r"(?:([0-9]{8,15})-)?[0-9]{8}T[0-9]{6}-[0-9a-f]{8}(?:-[0-9]{4,9})?")
"""Lease number of the run, its start time, its run id, and how many attempts it had written before."""


class Attempt(NamedTuple):
    """One attempt folder as a listing shows it. `files` maps file names to sizes in bytes."""

    lease: int
    step: int
    name: str
    url: str
    files: Mapping[str, int]

    @property
    def is_committed(self) -> bool:
        return COMMIT in self.files


def folder(out: str, step: int) -> str:
    return store.join(out, "checkpoints", f"step-{step:08d}")


def lease_of(name: str) -> int:
    """The lease number in the name of an attempt; 0 if it has none."""
    match = ATTEMPT.fullmatch(name)
    return int(match[1] or 0) if match else 0


def listed(out: str) -> list[Attempt]:
    """All attempts under `out`, newest first. One listing request on object stores. Raises StoreError."""
    attempts = _below(store.join(out, "checkpoints"), levels=2)
    return [one for one in attempts if STEP.fullmatch(one.url.split("/")[-2])]


def trained_on(out: str) -> str | None:
    """The fingerprint of the data that the newest committed checkpoint under `out` was trained on; None if there is no
    checkpoint, empty if it does not say. Raises StoreError.
    """
    newest = next((one for one in listed(out) if one.is_committed), None)
    if newest is None:
        return None
    try:
        return str(json.loads(store.read(store.join(newest.url, COMMIT)))["facts"]["stream"]["fingerprint"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _below(folder: str, *, levels: int) -> list[Attempt]:
    """The attempts that lie `levels` below a folder, newest first."""
    files: dict[str, dict[str, int]] = {}
    for path, size in store.tree(folder, depth=levels + 1).items():
        *above, name = path.split("/")
        if len(above) == levels and all((*above, name)):
            files.setdefault("/".join(above), {})[name] = size
        elif len(above) == levels - 1 and size < 0:
            files.setdefault(path, {})
    return in_order(_attempt(store.join(folder, path), inside) for path, inside in files.items())


def listed_at(source: str) -> list[Attempt]:
    """All attempts at `source`: the `out` of a run, the folder of a step, a single attempt, or `<run>/best`. Newest
    first. Stray files that are named like a checkpoint's but lie elsewhere are ignored. Raises StoreError.
    """
    if attempts := listed(source):
        return attempts
    if best := best_at(source):
        return [best]
    files = {} if STEP.fullmatch(source.rstrip("/").split("/")[-1]) else store.sizes(source)
    if any(file == COMMIT or file.endswith(".safetensors") for file in files):
        return [_attempt(source.rstrip("/"), files)]
    return [one for one in _below(source, levels=1) if one.is_committed or ATTEMPT.fullmatch(one.name)]


def best_at(name: str) -> Attempt | None:
    """The best checkpoint of a run, if `name` is `<run>/best`, by the `checkpoint.best` of its plan; else None. Raises
    StoreError if the run has none.
    """
    out = name.rstrip("/").removesuffix(BEST)
    if not name.rstrip("/").endswith(BEST) or store.children(name):
        return None
    committed = [one for one in listed(out) if one.is_committed]
    policy = _policy(out)
    if not committed and not policy:
        return None
    newest: dict[int, Attempt] = {}
    for one in committed:
        newest.setdefault(one.step, one)
    metric = str(policy.get("best"))
    scores = {step: scores_of(one).get(metric, math.nan) for step, one in newest.items()}
    step = best_step(scores, str(policy.get("best_is")))
    if step is None:
        if policy.get("best"):
            raise StoreError.during("find a checkpoint at", name, f"no checkpoint of the run has {metric} yet")
        hint = f"Type {out} for the newest one, or train with checkpoint.best=eval_loss"
        raise StoreError.during("find a checkpoint at", name, "the run has no checkpoint.best", hint)
    return newest[step]


def best_step(scores: Mapping[int, float], best_is: str) -> int | None:
    """The step with the lowest or highest score, of equal ones the first; None if no score is finite."""
    sign = -1 if best_is == "highest" else 1
    known = {step: sign * score for step, score in scores.items() if math.isfinite(score)}
    return min(known, key=lambda step: (known[step], step), default=None)


def scores_of(attempt: Attempt) -> Mapping[str, float]:
    """The metrics beside a commit; empty if there are none, or if they cannot be read."""
    if SCORES not in attempt.files:
        return {}
    try:
        scores = json.loads(store.read(store.join(attempt.url, SCORES)))
        return {str(name): float(value) for name, value in scores.items()}
    except (StoreError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _policy(out: str) -> Mapping[str, Any]:
    """The settings of a run for checkpoints, from its plan; empty if they cannot be read."""
    try:
        return dict(yaml.safe_load(store.read(store.join(out, "plan.yaml")))["checkpoint"])
    except (StoreError, yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError):
        return {}


def place(url: str) -> str:
    """The path of an attempt below `checkpoints`, such as step-00000012/00000001-...; a copy under another step keeps
    its name.
    """
    return "/".join(url.rstrip("/").split("/")[-2:])


def writer(url: str) -> str:
    """The process that wrote the attempt at `url`: its name without how many there were before."""
    name = url.rstrip("/").rpartition("/")[2]
    return re.sub(r"(?<=-[0-9a-f]{8})-[0-9]{4,9}$", "", name)


def remove(url: str) -> None:
    """Remove an attempt, its commit first, and the folder of its step if nothing else is in it. Raises StoreError."""
    store.remove(store.join(url, COMMIT))
    store.remove(url)
    step = url.rsplit("/", 1)[0]
    if not store.children(step):
        store.remove(step)


def in_order(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Sort attempts, newest first."""
    return sorted(attempts, key=lambda one: (one.lease, one.step, one.name, one.url), reverse=True)


def highest_lease(out: str) -> int:
    """The highest lease number among the attempts under `out`; 0 if there are none."""
    return max((one.lease for one in listed(out)), default=0)


def rivals(newest: Attempt, attempts: Sequence[Attempt], passed_over: Collection[str]) -> list[Attempt]:
    """Committed attempts that are older than `newest` but have done more steps, except those whose `place` is in
    `passed_over`.
    """
    behind = attempts[attempts.index(newest) + 1 :]
    return [one for one in behind if one.step > newest.step and one.is_committed and place(one.url) not in passed_over]


def dispute(newest: Attempt, rival: Attempt) -> str:
    """The error sentence for two checkpoints that could each be the newest."""
    return (
        f"two checkpoints claim to be the newest: step {rival.step} ({rival.url}) has done more steps, step "
        f"{newest.step} ({newest.url}) was written by a later run (number {newest.lease} after {rival.lease}). They "
        f"come from two runs, or were copied. To go on from step {newest.step}, remove {rival.url}. To go on from step "
        f"{rival.step}, copy that folder to checkpoints/{rival.url.split('/')[-2]}/ of another place and type "
        "out=<that place>"
    )


def _attempt(url: str, files: Mapping[str, int]) -> Attempt:
    step, name = ("", *url.split("/"))[-2:]
    number = STEP.fullmatch(step)
    return Attempt(lease_of(name), int(number[1]) if number else 0, name, url, files)
