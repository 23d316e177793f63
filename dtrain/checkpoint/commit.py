"""COMMIT.json: the one small file, written last, that makes a folder of shards a checkpoint."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from dtrain import store
from dtrain.errors import StoreError

NAME = "COMMIT.json"
FORMAT = 1


def folder(out: str, step: int) -> str:
    return store.join(out, "checkpoints", f"step-{step:08d}")


def write(url: str, commit: dict[str, Any]) -> None:
    """Create the commit of the attempt at `url`, with a digest of itself."""
    body = {"format": FORMAT, **commit}
    store.publish(store.join(url, NAME), json.dumps({**body, "digest": _digest(body)}, indent=1).encode())


def read(url: str) -> dict[str, Any]:
    """The commit of an attempt. Raises StoreError when there is none, when it is torn, or when a file is missing or has another size."""
    try:
        commit: dict[str, Any] = json.loads(store.read(store.join(url, NAME)))
        digest = commit.pop("digest")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise StoreError.during("read the commit of", url, f"it is damaged ({error})") from error
    if digest != _digest(commit):
        raise StoreError.during("read the commit of", url, "it is damaged (its digest differs)")
    if commit["format"] != FORMAT:
        raise StoreError.during("read the commit of", url, f"it has format {commit['format']}, this version reads {FORMAT}")
    for file in commit["files"]:
        if "/" in file["name"] or "\\" in file["name"]:
            raise StoreError.during("read the commit of", url, f"{file['name']!r} is no plain file name")
        if store.size(store.join(url, file["name"])) != file["size"]:
            raise StoreError.during("read the commit of", url, f"{file['name']} is missing or has another size")
    return commit


def is_valid(url: str) -> bool:
    """Whether the attempt at `url` is a checkpoint."""
    try:
        return bool(read(url))
    except StoreError:
        return False


def attempts(out: str) -> Iterator[tuple[int, str]]:
    """(step, URL) of everything under `out` that may be a checkpoint, newest first."""
    root = store.join(out, "checkpoints")
    for name in reversed(store.children(root)):
        if name.startswith("step-") and name[5:].isdigit():
            for attempt in reversed(store.children(store.join(root, name))):
                yield int(name[5:]), store.join(root, name, attempt)


def newest(out: str) -> tuple[tuple[str, dict[str, Any]] | None, list[str]]:
    """The newest attempt that verifies, with its commit, and a sentence for every damaged one passed over."""
    damaged = list[str]()
    for _, url in attempts(out):
        if store.exists(store.join(url, NAME)):
            try:
                return (url, read(url)), damaged
            except StoreError as error:
                damaged.append(str(error))
    return None, damaged


def _digest(commit: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(commit, sort_keys=True).encode()).hexdigest()
