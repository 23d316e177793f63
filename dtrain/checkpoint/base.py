"""The base of an adapter: the checkpoint whose weights it leaves as they are. A checkpoint of the adapter holds its URL
and digest instead of these weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtrain.checkpoint import commit as commits
from dtrain.checkpoint.commit import DamagedError
from dtrain.errors import StoreError
from dtrain.storage import store


def reference(url: str, commit: Mapping[str, Any]) -> dict[str, str]:
    """URL and digest of the base at `url`, which was read as `commit`, for the facts of an adapter's checkpoint."""
    place = str(Path(store.local_path(url)).absolute()) if store.is_local(url) else url
    return {"url": place, "digest": commits.digest(commit)}


def find(base: Mapping[str, str], moved: str | None = None) -> tuple[str, dict[str, Any]]:
    """(URL, commit) of the base with this reference; `moved`: a run or checkpoint to look at if it is not where it was.
    Raises StoreError if it is gone or was changed.
    """
    try:
        commit = commits.read(base["url"])
        if commits.digest(commit) == base["digest"]:
            return base["url"], commit
        cause = "it was changed since"
    except DamagedError:
        cause = "it is damaged, or not there any more"
    if moved is not None:
        for url, other, _ in commits.candidates_at(moved):
            if other is not None and commits.digest(other) == base["digest"]:
                return url, other
        cause += f", and is not at {moved} either"
    hint = f"Bring it back (its digest begins with {base['digest'][:8]}), or train on with init=<where it is now>"
    raise StoreError.during("load the base of the adapter from", base["url"], cause, hint)
