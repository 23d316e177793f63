"""The save attempts under a run's `out`, read from folder names alone: which exist, and in which order they were
written.

    <out>/checkpoints/step-00000100/00000003-20260101T000000-0123abcd-0001/

The name of an attempt begins with the lease number of its run. A new lease gets a number above every existing lease and
attempt, so a later run's attempts sort as newer, regardless of their step and of any clock.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dtrain.storage import store

COMMIT, IMPORTED = "COMMIT.json", "imported.yaml"
"""An attempt with the first is a committed checkpoint; a folder with the second holds weights of others."""
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
    """All attempts at `source`: the `out` of a run, the folder of a step, or a single attempt. Newest first. Stray
    files that are named like a checkpoint's but lie elsewhere are ignored. Raises StoreError.
    """
    if attempts := listed(source):
        return attempts
    files = {} if STEP.fullmatch(source.rstrip("/").split("/")[-1]) else store.sizes(source)
    if any(file == COMMIT or file.endswith(".safetensors") for file in files):
        return [_attempt(source.rstrip("/"), files)]
    return _below(source, levels=1)


def place(url: str) -> str:
    """The path of an attempt below `checkpoints`, such as step-00000012/00000001-...; a copy under another step keeps
    its name.
    """
    return "/".join(url.rstrip("/").split("/")[-2:])


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
