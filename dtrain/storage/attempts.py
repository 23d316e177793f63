"""The attempts to save under a run's `out`, by their names alone: which there are, and in which order they were
written.

    <out>/checkpoints/step-00000100/00000003-20260101T000000-0123abcd-0001/

An attempt's name begins with the number of the lease of its run. A new lease gets a number above all leases and all
attempts that are there, so what a later run wrote is newer, whatever its step is and whatever the clocks said.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dtrain.storage import store

COMMIT = "COMMIT.json"
"""The file that makes an attempt a checkpoint."""
STEP = re.compile(r"step-([0-9]{8,15})")
ATTEMPT = re.compile(r"(?:([0-9]{8,15})-)?[0-9]{8}T[0-9]{6}-[0-9a-f]{8}(?:-[0-9]{4,9})?")
"""The lease of the run that wrote it, when its run began, which run it was, how many it had written before."""


class Attempt(NamedTuple):
    """One folder, as a listing shows it: `files` maps names to bytes."""

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
    """The number of the lease in an attempt's name; 0 when it has none."""
    match = ATTEMPT.fullmatch(name)
    return int(match[1] or 0) if match else 0


def listed(out: str) -> list[Attempt]:
    """Everything under `out` that may be a checkpoint, newest first. One listing on object stores. Raises
    StoreError.
    """
    root = store.join(out, "checkpoints")
    files: dict[tuple[str, str], dict[str, int]] = {}
    for path, size in store.tree(root, depth=3).items():
        step, attempt, name = (*path.split("/"), "", "")[:3]
        if STEP.fullmatch(step) and attempt and (name or size < 0):
            files.setdefault((step, attempt), {}).update({name: size} if name else {})
    return in_order(
        _attempt(step, attempt, store.join(root, step, attempt), inside) for (step, attempt), inside in files.items()
    )


def listed_in(folder: str) -> list[Attempt]:
    """The same of one step's folder."""
    step, files = folder.rstrip("/").rsplit("/", 1)[-1], dict[str, dict[str, int]]()
    for path, size in store.tree(folder, depth=2).items():
        attempt, name = (*path.split("/"), "")[:2]
        if name or size < 0:
            files.setdefault(attempt, {}).update({name: size} if name else {})
    return in_order(_attempt(step, attempt, store.join(folder, attempt), inside) for attempt, inside in files.items())


def listed_at(source: str) -> list[Attempt]:
    """The same of a run's `out`, a step's folder or one attempt. What has the name of an attempt's file, and lies where
    none is, hides nothing.
    """
    *above, name = source.rstrip("/").split("/")
    if (found := listed(source)) or STEP.fullmatch(name):
        return found or listed_in(source)
    files = store.sizes(source)
    if any(file == COMMIT or file.endswith(".safetensors") for file in files):
        step = STEP.fullmatch(above[-1]) if above else None
        return [Attempt(0, int(step[1]) if step else 0, name, source.rstrip("/"), files)]
    return listed_in(source)


def place(url: str) -> str:
    """Of an attempt below `checkpoints`: step-00000012/00000001-...; a copy under another step has the same name."""
    return "/".join(url.rstrip("/").split("/")[-2:])


def in_order(attempts: Iterable[Attempt]) -> list[Attempt]:
    """The newest first."""
    return sorted(attempts, key=lambda one: (one.lease, one.step, one.name, one.url), reverse=True)


def highest_lease(out: str) -> int:
    """The highest lease number in the names of the attempts under `out`; 0 when there is none."""
    return max((one.lease for one in listed(out)), default=0)


def rivals(newest: Attempt, attempts: Sequence[Attempt], passed_over: Collection[str]) -> list[Attempt]:
    """Committed attempts that come before `newest` in order although they have done more steps, but for those whose
    place is in `passed_over`.
    """
    behind = attempts[attempts.index(newest) + 1 :]
    return [one for one in behind if one.step > newest.step and one.is_committed and place(one.url) not in passed_over]


def dispute(newest: Attempt, rival: Attempt) -> str:
    """A sentence about two checkpoints of which each may be the newest."""
    return (
        f"two checkpoints claim to be the newest: step {rival.step} ({rival.url}) has done more steps, step "
        f"{newest.step} ({newest.url}) was written "
        f"by a later run (number {newest.lease} after {rival.lease}). They come from two runs, or were copied. To go "
        f"on from step {newest.step}, remove "
        f"{rival.url}. To go on from step {rival.step}, copy that folder to checkpoints/{rival.url.split('/')[-2]}/ "
        "of another place and type out=<that place>"
    )


def _attempt(step: str, name: str, url: str, files: Mapping[str, int]) -> Attempt:
    number = STEP.fullmatch(step)
    return Attempt(lease_of(name), int(number[1]) if number else 0, name, url, files)
