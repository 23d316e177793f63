"""COMMIT.json: the one small file, written last, that makes a folder of shards a checkpoint."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

from dtrain import store
from dtrain.checkpoint.format import mapping, numbers, strict
from dtrain.errors import StoreError

NAME = "COMMIT.json"
FORMAT = 1
LARGEST = 256 << 20
"""Bytes; no longer commit is read."""
STREAMS = 16
"""Folders looked at at a time."""

STEP = re.compile(r"step-([0-9]{8,15})")
ATTEMPT = re.compile(r"(?:([0-9]{8})-)?[0-9]{8}T[0-9]{6}-[0-9a-f]{8}(?:-[0-9]{4,9})?")
"""The lease of the run that wrote it, when its run began, which run it was, how many it had written before."""
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class DamagedError(StoreError):
    """A checkpoint that is there, and is not what was saved: an older one may be."""


def folder(out: str, step: int) -> str:
    return store.join(out, "checkpoints", f"step-{step:08d}")


def write(url: str, commit: Mapping[str, Any]) -> None:
    """Create the commit of the attempt at `url`, with a digest of itself."""
    body = {"format": FORMAT, **commit}
    store.publish(store.join(url, NAME), json.dumps({**body, "digest": _digest(body)}).encode())


def read(url: str) -> dict[str, Any]:
    """The commit of an attempt, in which every tensor is covered once. Raises DamagedError when there is none, when it is not as it was written,
    or when a file is missing or has another size; StoreError when the storage does not answer."""
    sizes = store.sizes(url)
    if not 0 <= sizes.get(NAME, -1) <= LARGEST:
        raise _damaged(url, f"it has {sizes[NAME]} bytes" if NAME in sizes else "there is none")
    try:
        commit = mapping(strict(store.read(store.join(url, NAME))))
        digest = commit.pop("digest", None)
        if digest != _digest(commit):
            raise ValueError("its digest differs")
        if commit.get("format") != FORMAT:
            raise _damaged(url, f"it has format {commit.get('format')}, this version reads {FORMAT}")
        _check(commit)
        place = STEP.fullmatch(url.rstrip("/").split("/")[-2]) if "/" in url.rstrip("/") else None
        if place and int(place[1]) != commit["step"]:
            raise ValueError(f"it is one of step {commit['step']}, and stands in another's place")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(url, f"it is damaged ({_short(error)})") from error
    check_files(url, commit["files"], sizes)
    return commit


def check_files(url: str, files: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> None:
    """Raises DamagedError when a file of the attempt is not among `sizes`, or has another one."""
    for file in files:
        if sizes.get(file["name"]) != file["size"]:
            raise _damaged(url, f"{file['name']} is missing or has another size")


def attempts(out: str) -> list[tuple[int, str]]:
    """(step, URL) of everything under `out` that may be a checkpoint, newest first: what a newer lease wrote is newer, whatever its step."""
    root = store.join(out, "checkpoints")
    steps = {name: int(match[1]) for name in store.children(root) if (match := STEP.fullmatch(name))}
    with ThreadPoolExecutor(STREAMS) as pool:
        children = pool.map(lambda name: store.children(store.join(root, name)), steps)
    found = [(_lease(attempt), steps[name], attempt, name) for name, attempts in zip(steps, children, strict=True) for attempt in attempts]
    return [(step, store.join(root, name, attempt)) for _, step, attempt, name in sorted(found, reverse=True)]


def candidates(out: str) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """(URL, commit, nothing) of every checkpoint under `out`, newest first; (URL, None, what is wrong) for one that is damaged."""
    return read_each(url for _, url in attempts(out))


def read_each(urls: Iterable[str]) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """As `candidates`; what has no commit is passed over in silence."""
    for url in urls:
        if store.exists(store.join(url, NAME)):
            try:
                yield url, read(url), ""
            except DamagedError as error:
                yield url, None, str(error)


def newest(out: str) -> tuple[tuple[str, dict[str, Any]] | None, list[str]]:
    """The newest attempt that verifies, with its commit, and a sentence for every damaged one passed over. Digests of shards are not looked at."""
    return _first(candidates(out))


def found_at(source: str) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """As `candidates`, for a run's `out`, a step's folder or one attempt."""
    if store.exists(store.join(source, NAME)):
        return read_each([source])
    return read_each([url for _, url in attempts(source)] or [store.join(source, name) for name in reversed(store.children(source))])


def find(source: str) -> tuple[str, dict[str, Any]]:
    """(attempt URL, commit) for a run's `out`, a step's folder or an attempt. Raises StoreError when nothing valid is there."""
    chosen, damaged = _first(found_at(source))
    if chosen is None:
        raise StoreError.during("find a checkpoint at", source, "; ".join(damaged) or "there is no committed one")
    return chosen


def _first(candidates: Iterable[tuple[str, dict[str, Any] | None, str]]) -> tuple[tuple[str, dict[str, Any]] | None, list[str]]:
    damaged = list[str]()
    for url, commit, fault in candidates:
        if commit is not None:
            return (url, commit), damaged
        damaged.append(fault)
    return None, damaged


def _check(commit: Mapping[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError when the commit does not describe tensors of which every element lies in one piece."""
    if type(commit["step"]) is not int or commit["step"] < 0 or mapping(commit["facts"])["step"] != commit["step"]:
        raise ValueError("its step is none")
    mapping(commit["facts"]["optim"])
    files = set[str]()
    for file in commit["files"]:
        numbers([file["size"]])
        if not isinstance(file["name"], str) or not FILE.fullmatch(file["name"]) or file["name"] in files:
            raise ValueError(f"{file['name']!r} is no plain file name, or stands in it twice")
        if not re.fullmatch("[0-9a-f]{64}", file["sha256"]):
            raise ValueError(f"the digest of {file['name']} is none")
        files.add(file["name"])
    pieces: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {name: [] for name in mapping(commit["tensors"])}
    for piece in commit["pieces"]:
        if piece["file"] not in files or not isinstance(piece["key"], str):
            raise ValueError(f"a piece of {piece['name']} lies nowhere")
        pieces[piece["name"]].append((numbers(piece["offset"]), numbers(piece["shape"])))
    for name, facts in commit["tensors"].items():
        if not isinstance(facts["dtype"], str):
            raise ValueError(f"{name} has no type")
        if not _covered(numbers(facts["shape"]), pieces[name]):
            raise ValueError(f"{name} does not lie in its pieces once and whole")


def _covered(shape: tuple[int, ...], pieces: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether (offset, shape) of the pieces cut a tensor of `shape`: all inside, none over another, together as large."""
    boxes = [(low, tuple(map(sum, zip(low, size, strict=True)))) for low, size in pieces if len(low) == len(size) == len(shape)]
    inside = all(end <= whole for _, high in boxes for end, whole in zip(high, shape, strict=True))
    if len(boxes) != len(pieces) or not inside or sum(prod(size) for _, size in pieces) != prod(shape):
        return False
    open_: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for low, high in sorted(box for box in boxes if all(a < b for a, b in zip(*box, strict=True))):
        open_ = [box for box in open_ if box[1][:1] > low[:1]]  # in order of the first dim: what ended before cannot meet what comes
        if any(all(max(a, c) < min(b, d) for a, b, c, d in zip(low, high, *box, strict=True)) for box in open_):
            return False
        open_.append((low, high))
    return True


def _lease(attempt: str) -> int:
    match = ATTEMPT.fullmatch(attempt)
    return int(match[1] or 0) if match else 0


def _damaged(url: str, cause: str) -> DamagedError:
    return DamagedError(str(StoreError.during("read the commit of", url, cause)))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200] if not isinstance(error, ValueError) else str(error)[:200]


def _digest(commit: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(commit, sort_keys=True).encode()).hexdigest()
