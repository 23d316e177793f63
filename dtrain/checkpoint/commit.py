"""COMMIT.json: the one small file, written last, that makes a folder of shards a checkpoint."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from dtrain.config import structure
from dtrain.config.structure import COUNT, FINITE, FLAG, MAPPING, NUMBER, TEXT, Each, Optional
from dtrain.errors import StoreError
from dtrain.secrets import masked, screen
from dtrain.storage import store
from dtrain.storage.attempts import ATTEMPT, COMMIT, IMPORTED, STEP, Attempt, dispute, listed, listed_at, rivals
from dtrain.weights.safetensors import mapping, strict

NAME = COMMIT
FORMAT = 1
LARGEST = 256 << 20
"""Largest size of a commit, in bytes."""
STREAMS = 16
"""Number of commits read at a time."""

SAMPLE = {"name": TEXT, "bytes": COUNT, "stamp": TEXT, "blocks": COUNT, "sha256": TEXT}
SHAPE = {
    "format?": COUNT, "step": COUNT, "attempt?": TEXT, "lease?": COUNT, "world?": COUNT,
    "mesh?": Each(COUNT, named=True), "passed_over?": Each(TEXT),
    "facts": {
        "step": COUNT, "first?": COUNT, "seconds?": NUMBER, "optim": MAPPING,
        "stream?": Optional(
            {"seen": COUNT, "passed_over?": Each(COUNT), "batch": COUNT, "passed": COUNT, "files?": Each(SAMPLE)}
        ),
        "scale?": Optional({"value": FINITE, "good": COUNT, "skipped?": COUNT}),
        "spikes?": Optional({"norms": Each(FINITE), "losses": Each(FINITE), "row": COUNT}),
        "huggingface?": Optional(MAPPING), "as_transformers?": Optional(MAPPING),
        "tied?": Optional(Each(TEXT, named=True)), "resting?": Each(TEXT),
        "adapter?": Optional({"kind": TEXT, "rank": COUNT, "alpha": NUMBER, "packed?": Each(TEXT), "double?": FLAG}),
        "reference?": Optional({"url": Optional(TEXT), "digest": TEXT}),
        "base?": Optional({"url": TEXT, "digest": TEXT, "names?": Optional(MAPPING), "tensors?": Each(TEXT)}),
    },
    "files": Each({"name": TEXT, "size": COUNT, "sha256": TEXT}),
    "tensors": Each({"shape": Each(COUNT), "dtype": TEXT}, named=True),
    "pieces": Each({"name": TEXT, "key": TEXT, "file": TEXT, "offset": Each(COUNT), "shape": Each(COUNT)}),
}  # fmt: skip
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Candidate = tuple[str, dict[str, Any] | None, str]
"""(URL, commit, "") of a checkpoint, or (URL, None, problem) of a damaged one."""


class DamagedError(StoreError):
    """The bytes of a checkpoint are not those that were saved; an older one may be valid."""


class MisfitError(StoreError):
    """A checkpoint is whole, but of another model or optimizer than this run, or says what cannot be."""


def write(url: str, commit: Mapping[str, Any]) -> None:
    """Write the commit of the attempt at `url`, with a digest of itself. Its folder must exist: another storage may
    have been mounted there since the files were written.
    """
    body = {"format": FORMAT, **commit}
    store.publish(store.join(url, NAME), json.dumps({**body, "digest": digest(body)}).encode(), parents=False)


def fault(commit: Mapping[str, Any]) -> str:
    """Why this commit could not be read back; empty if it can."""
    try:
        _check(commit)
    except (ValueError, KeyError, TypeError) as error:
        return _short(error)
    return ""


def read(url: str, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The verified commit of an attempt. `sizes`: those of its files, if they were just listed.

    Raises DamagedError if it is missing or altered, or if a file is missing or has another size; StoreError if the
    storage does not answer.
    """
    sizes = store.sizes(url) if sizes is None else sizes
    size = sizes.get(NAME, -1)
    if size < 0:
        size = _unlisted_size(store.join(url, NAME))
    if size < 0:
        raise _damaged(url, "there is none")
    if size > LARGEST:
        raise _damaged(url, f"it has {size} bytes")
    try:
        commit = mapping(strict(_read(store.join(url, NAME))))
        saved = commit.pop("digest", None)
        if saved != digest(commit):
            raise ValueError("its digest differs")
        if commit.get("format") != FORMAT:
            raise _damaged(url, f"it has format {commit.get('format')}, this version reads {FORMAT}")
        _check(commit)
        _check_place(url, commit)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(url, f"it is damaged ({_short(error)})") from error
    check_files(url, commit["files"], sizes)
    return commit


def _unlisted_size(where: str) -> int:
    """Bytes of a commit that a listing, which may be old, does not have; below 0 if there is none. A folder has 0."""
    if store.is_local(where):
        return 0 if store.exists(where) else -1
    return store.size(where)


def _read(where: str) -> bytes:
    """The bytes of a commit. Raises ValueError if there is a folder, or anything but a file, of that name."""
    try:
        return store.read(where)
    except StoreError as error:
        if error.kind == "odd":
            raise ValueError(str(error)) from error
        raise


def _check_place(url: str, commit: Mapping[str, Any]) -> None:
    """Raises ValueError if the folder has the name of another step or of another run's attempt."""
    above, name = ("", *url.rstrip("/").split("/"))[-2:]
    step, attempt = STEP.fullmatch(above), ATTEMPT.fullmatch(name)
    if step and int(step[1]) != commit["step"]:
        raise ValueError(f"it is of step {commit['step']}, but in the folder of another step")
    if attempt and commit.get("attempt", name) != name:
        raise ValueError(f"it is of the attempt {commit['attempt']}, but in the folder of another attempt")


def check_files(url: str, files: Sequence[Mapping[str, Any]], sizes: Mapping[str, int]) -> None:
    """Raises DamagedError if a file of the attempt is missing in `sizes`, or has another size."""
    for file in files:
        where = store.join(url, file["name"])
        if sizes.get(file["name"]) != file["size"] and store.size(where) != file["size"]:  # listings may be late
            raise _damaged(url, f"{file['name']} is missing or has another size")


def candidates(out: str) -> Iterator[Candidate]:
    """Every checkpoint under `out`, newest first; attempts without a commit are left out. Raises StoreError if the
    storage cannot be listed.
    """
    return read_each(listed(out))


def read_each(attempts: Sequence[Attempt]) -> Iterator[Candidate]:
    """Like `candidates`, for these attempts."""
    for attempt in attempts:
        if attempt.is_committed:
            try:
                commit = read(attempt.url, attempt.files)
            except DamagedError as error:
                yield attempt.url, None, str(error)
                continue
            agree(attempt, commit, attempts)
            yield attempt.url, commit, ""


def agree(newest: Attempt, commit: Mapping[str, Any], attempts: Sequence[Attempt]) -> None:
    """Raises StoreError if a checkpoint has more steps than `newest`, unless it was skipped as damaged before `newest`
    was written.
    """
    for rival in rivals(newest, attempts, commit.get("passed_over", ())):
        with contextlib.suppress(DamagedError):
            read(rival.url, rival.files)
            out = newest.url.split("/checkpoints/")[0]
            raise StoreError.during("choose a checkpoint under", out, dispute(newest, rival))


def candidates_at(source: str) -> Iterator[Candidate]:
    """Like `candidates`, for a run's `out`, a step's folder or one attempt."""
    return read_each(listed_at(source))


def find(source: str) -> tuple[str, dict[str, Any]]:
    """(attempt URL, commit) for a run's `out`, a step's folder or an attempt. Raises StoreError if none is valid."""
    chosen, damaged = first(candidates_at(source))
    if chosen is None:
        cause = "; ".join(problem for _, problem in damaged) or none_at(source)
        raise StoreError.during("find a checkpoint at", source, cause)
    return chosen


def none_at(source: str) -> str:
    """A cause for a place without a committed checkpoint."""
    if store.exists(store.join(source, IMPORTED)):
        return "its import was broken off. Type dtrain checkpoint import again, with the same words"
    return "there is no committed one"


def data_of(places: Iterable[str]) -> str | None:
    """The fingerprint of the data of the newest checkpoint at the first of these places that has one."""
    for source in places:
        chosen, _ = first(candidates_at(source))
        if chosen is not None:
            return (chosen[1]["facts"].get("stream") or {}).get("fingerprint")
    return None


def first(candidates: Iterable[Candidate]) -> tuple[tuple[str, dict[str, Any]] | None, list[tuple[str, str]]]:
    """(URL, commit) of the first valid candidate, and (URL, problem) of the damaged ones before it. Digests of shards
    are not verified.
    """
    damaged = list[tuple[str, str]]()
    for url, commit, problem in candidates:
        if commit is not None:
            return (url, commit), damaged
        damaged.append((url, problem))
    return None, damaged


def report_damaged(faults: Iterable[str], step: int) -> None:
    """Print the faults of the checkpoints that a reader passed over, and the step that it uses."""
    for fault in faults:
        text = f"a damaged checkpoint is passed over: {fault}. Step {step} is used instead."
        screen.complain(masked(text), begin="note: ")


def _check(commit: Mapping[str, Any]) -> None:
    """Raises ValueError unless every element of every tensor is in exactly one piece."""
    if problem := structure.fault(commit, SHAPE):
        raise ValueError(problem)
    if commit["facts"]["step"] != commit["step"]:
        raise ValueError(f"it is of step {commit['step']}, its facts of step {commit['facts']['step']}")
    if commit["facts"].get("first", 0) > commit["step"]:
        raise ValueError(f"it is of step {commit['step']}, and began at step {commit['facts']['first']}")
    if (commit["facts"].get("scale") or {"value": 1})["value"] <= 0:
        raise ValueError("facts.scale.value is not above 0")
    _check_spikes(commit["facts"].get("spikes") or {})
    if commit["facts"].get("stream"):
        _check_position(commit["step"], commit["facts"]["stream"])
    files = set[str]()
    for file in commit["files"]:
        if not FILE.fullmatch(file["name"]) or file["name"] in files:
            raise ValueError(f"{file['name']!r} is not a plain file name, or is listed twice")
        if not re.fullmatch("[0-9a-f]{64}", file["sha256"]):
            raise ValueError(f"the digest of {file['name']} is not a SHA-256")
        files.add(file["name"])
    pieces: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {name: [] for name in commit["tensors"]}
    for piece in commit["pieces"]:
        if piece["file"] not in files or piece["name"] not in pieces:
            raise ValueError(f"a piece of {piece['name']} has no file or no tensor")
        pieces[piece["name"]].append((tuple(piece["offset"]), tuple(piece["shape"])))
    for name, facts in commit["tensors"].items():
        if not _covered(tuple(facts["shape"]), pieces[name]):
            raise ValueError(f"the pieces of {name} do not cover it exactly once")


def _check_spikes(spikes: Mapping[str, Any]) -> None:
    """Raises ValueError unless the spike window has as many losses as gradient norms."""
    norms, losses = (len(spikes.get(name, ())) for name in ("norms", "losses"))
    if norms != losses:
        raise ValueError(f"facts.spikes has {norms} norms and {losses} losses")


def _check_position(step: int, stream: Mapping[str, Any]) -> None:
    """Raises ValueError unless the number of samples seen is that of the steps done and the batches skipped."""
    batch, passed = stream["batch"], stream["passed"]
    if stream["seen"] != batch * (step + passed):
        raise ValueError(
            f"it has seen {stream['seen']} samples, but {step} steps and {passed} skipped batches of {batch} samples "
            f"are {batch * (step + passed)}"
        )


def _covered(shape: tuple[int, ...], pieces: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether pieces (offset, shape) partition a tensor of `shape`: inside it, disjoint, and of the same total size."""
    fitting = [(low, size) for low, size in pieces if len(low) == len(size) == len(shape)]
    boxes = [(low, tuple(map(sum, zip(low, size, strict=True)))) for low, size in fitting]
    inside = all(end <= whole for _, high in boxes for end, whole in zip(high, shape, strict=True))
    if len(boxes) != len(pieces) or not inside or sum(prod(size) for _, size in pieces) != prod(shape):
        return False
    open_: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for low, high in sorted(box for box in boxes if all(a < b for a, b in zip(*box, strict=True))):
        # boxes are sorted by the first dim: those that end before this one begins cannot overlap it or a later one
        open_ = [box for box in open_ if box[1][:1] > low[:1]]
        if any(all(max(a, c) < min(b, d) for a, b, c, d in zip(low, high, *box, strict=True)) for box in open_):
            return False
        open_.append((low, high))
    return True


def _damaged(url: str, cause: str) -> DamagedError:
    return DamagedError(str(StoreError.during("read the commit of", url, cause)))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200] if not isinstance(error, ValueError) else str(error)[:200]


def digest(commit: Mapping[str, Any]) -> str:
    """SHA-256 of a commit, and so of all that its files hold, in hex."""
    return hashlib.sha256(json.dumps(commit, sort_keys=True).encode()).hexdigest()
