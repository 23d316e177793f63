"""A survey of a URL: every attempt to save, its status, and whether its bytes are intact."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from dtrain.checkpoint import commit as commits
from dtrain.checkpoint import shards
from dtrain.checkpoint.load import parse_file, read_file
from dtrain.storage import attempts as listing
from dtrain.storage import store

STREAMS = 4
"""Number of files verified at a time; each is in memory as a whole, and small unless a row of a tensor is large."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to save. `commit`: if valid; `fault`: if damaged; `begun`: the start of its run, from its name."""

    listed: listing.Attempt
    status: Literal["valid", "damaged", "uncommitted"]
    commit: Mapping[str, Any] | None
    fault: str
    size: int
    begun: datetime.datetime | None
    scores: Mapping[str, float]

    @property
    def step(self) -> int:
        return self.listed.step

    @property
    def url(self) -> str:
        return self.listed.url

    @property
    def name(self) -> str:
        return self.listed.name


def attempts(listed: Sequence[listing.Attempt]) -> Iterator[Attempt]:
    """The attempts of a listing, in its order. Raises StoreError."""
    with ThreadPoolExecutor(commits.STREAMS) as pool:
        yield from pool.map(_look, listed)


def dispute(attempts: Sequence[Attempt]) -> str:
    """Why the first valid attempt may not be the newest; empty if it is."""
    valid = [attempt for attempt in attempts if attempt.commit is not None]
    if not valid or valid[0].commit is None:
        return ""
    newest, passed_over = valid[0].listed, valid[0].commit.get("passed_over", ())
    for rival in listing.rivals(newest, [one.listed for one in valid], passed_over):
        return listing.dispute(newest, rival)
    return ""


def faults(url: str, commit: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for every damaged file of a commit. Raises StoreError if the storage does not answer."""
    pieces = shards.grouped(commit["pieces"], "file")

    def check(file: Mapping[str, Any]) -> str:
        where = store.join(url, file["name"])
        try:
            parse_file(where, read_file(where, file), commit, pieces[file["name"]])
        except commits.DamagedError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(STREAMS) as pool:
        yield from filter(None, pool.map(check, commit["files"]))


def _look(listed: listing.Attempt) -> Attempt:
    url, begun, size = listed.url, _begun(listed.name), sum(listed.files.values())
    if not listed.is_committed:
        return Attempt(listed=listed, status="uncommitted", commit=None, fault="", size=size, begun=begun, scores={})
    try:
        commit = commits.read(url, listed.files)
    except commits.DamagedError as error:
        return Attempt(
            listed=listed, status="damaged", commit=None, fault=str(error), size=size, begun=begun, scores={}
        )
    return Attempt(
        listed=listed, status="valid", commit=commit, fault="", size=size, begun=begun, scores=listing.scores_of(listed)
    )


def _begun(name: str) -> datetime.datetime | None:
    """The time in the name of an attempt; None if there is none."""
    match = listing.ATTEMPT.fullmatch(name)
    stamp = next((part for part in name.split("-") if "T" in part), "") if match else ""
    try:
        return datetime.datetime.strptime(stamp, "%Y%m%dT%H%M%S").replace(tzinfo=datetime.UTC)
    except ValueError:
        return None
