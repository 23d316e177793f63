"""What lies at a URL: every attempt to save, whether it is a checkpoint, and whether its bytes are those that were saved."""

import datetime
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from dtrain import store
from dtrain.checkpoint import commit as commits
from dtrain.checkpoint.load import parse_file, read_file
from dtrain.checkpoint.retention import SCORES
from dtrain.errors import StoreError

STREAMS = 4
"""Files that are verified at a time; each is in memory whole, and a file is small unless one row of a tensor is large."""


@dataclass(frozen=True)
class Attempt:
    """`commit` is there when `status` is valid; `fault` says what is wrong when it is damaged; `begun`: when its run began, by its name."""

    step: int | None
    url: str
    status: Literal["valid", "damaged", "uncommitted"]
    commit: Mapping[str, Any] | None
    fault: str
    size: int
    begun: datetime.datetime | None
    scores: Mapping[str, float]

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def attempts(source: str) -> Iterator[Attempt]:
    """Of a run's `out`, a step's folder or one attempt, newest first. Raises StoreError when nothing is there."""
    inside = store.children(source)
    if not inside:
        raise StoreError.during("find a checkpoint at", source, "nothing is there")
    if any(name == commits.NAME or name.endswith(".safetensors") for name in inside):
        places = [source.rstrip("/")]
    else:
        places = [url for _, url in commits.attempts(source)]
        if not places and commits.STEP.fullmatch(source.rstrip("/").rsplit("/", 1)[-1]):
            places = [store.join(source, name) for name in reversed(inside)]
    for url in places:
        yield _look(url)


def faults(url: str, commit: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for every file of a commit that is not what was saved. Raises StoreError when the storage does not answer."""
    pieces: dict[str, list[Mapping[str, Any]]] = {file["name"]: [] for file in commit["files"]}
    for piece in commit["pieces"]:
        pieces[piece["file"]].append(piece)

    def check(file: Mapping[str, Any]) -> str:
        where = store.join(url, file["name"])
        try:
            entries = parse_file(where, read_file(where, file))
        except commits.DamagedError as error:
            return str(error)
        for piece in pieces[file["name"]]:
            entry = entries.get(piece["key"])
            if entry is None or list(entry.shape) != piece["shape"] or str(entry.dtype) != commit["tensors"][piece["name"]]["dtype"]:
                return str(commits.DamagedError.during("load", where, f"its {piece['key'][:80]!r} is not what the commit says"))
        return ""

    with ThreadPoolExecutor(STREAMS) as pool:
        yield from filter(None, pool.map(check, commit["files"]))


def _look(url: str) -> Attempt:
    sizes = store.sizes(url)
    size, begun, step = sum(sizes.values()), _begun(url.rsplit("/", 1)[-1]), commits.STEP.fullmatch(url.rsplit("/", 2)[-2])
    number = int(step[1]) if step else None
    if commits.NAME not in sizes:
        return Attempt(number, url, "uncommitted", None, "", size, begun, {})
    try:
        commit = commits.read(url)
    except commits.DamagedError as error:
        return Attempt(number, url, "damaged", None, str(error), size, begun, {})
    return Attempt(commit["step"], url, "valid", commit, "", size, begun, _scores(url) if SCORES in sizes else {})


def _begun(name: str) -> datetime.datetime | None:
    """The time in the name of an attempt."""
    match = commits.ATTEMPT.fullmatch(name)
    stamp = next((part for part in name.split("-") if "T" in part), "") if match else ""
    try:
        return datetime.datetime.strptime(stamp, "%Y%m%dT%H%M%S").replace(tzinfo=datetime.UTC)
    except ValueError:
        return None


def _scores(url: str) -> Mapping[str, float]:
    """Figures of an evaluation; none when they cannot be read, for nothing depends on them here."""
    try:
        told = json.loads(store.read(store.join(url, SCORES)))
        return {str(name): float(value) for name, value in told.items()}
    except (StoreError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
