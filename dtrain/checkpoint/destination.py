"""Where an export goes: a folder on any storage, or a repository of the Hugging Face hub.

A folder gets the file last by which a reader takes it for whole; a repository gets all files in one commit.
"""

import mmap
from pathlib import Path
from typing import Any, Protocol, cast

from dtrain.errors import StoreError, first_line
from dtrain.storage import hub, leftovers, store

SMALL = 8 << 20
"""Bytes of a file that waits in memory for the commit."""


class Destination(Protocol):
    def refuse_existing(self, *names: str) -> None:
        """Raises StoreError if one of these files is there."""

    def file(self, path: Path) -> str:
        """Take a local file, which may be removed afterwards. Returns its URL. Raises StoreError."""

    def small(self, name: str, data: bytes) -> str:
        """The same for bytes."""

    def finish(self) -> None:
        """All files are there. Raises StoreError."""


def destination(to: str) -> Destination:
    """Raises PreflightError without the hub's package or a network, StoreError for a repository that is refused."""
    return Repository(to) if to.startswith(hub.SCHEME) else Folder(to)


class Folder:
    def __init__(self, to: str) -> None:
        self._to = to

    def refuse_existing(self, *names: str) -> None:
        leftovers.remove_parts(self._to, names)
        for name in names:
            if store.exists(store.join(self._to, name)):
                cause, hint = "it is there already", "Type to=<another place>, or remove it"
                raise StoreError.during("write", store.join(self._to, name), cause, hint)

    def file(self, path: Path) -> str:
        url = store.join(self._to, path.name)
        if not store.is_local(url):
            store.upload(path, url)
            return url
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
            store.publish(url, cast(bytes, memory))
        return url

    def small(self, name: str, data: bytes) -> str:
        store.publish(store.join(self._to, name), data)
        return store.join(self._to, name)

    def finish(self) -> None: ...


class Repository:
    """hf://<organisation>/<name>[@<branch>], which is created if it is not there. Large files are uploaded as they come
    and are part of nothing until `finish` commits them.
    """

    def __init__(self, to: str) -> None:
        client: Any = hub.client(to)
        self._to, self._client, self._operations = to, client, list[Any]()
        self._name, _, branch = to.removeprefix(hub.SCHEME).strip("/").partition("@")
        self._hub, self._where = client.HfApi(), {"repo_id": self._name, "revision": branch or None}
        self._ask("create", lambda: self._hub.create_repo(self._name, exist_ok=True))
        if branch:
            self._ask("create", lambda: self._hub.create_branch(self._name, branch=branch, exist_ok=True))

    def refuse_existing(self, *names: str) -> None:
        there = self._ask("list", lambda: self._hub.list_repo_files(**self._where))
        if taken := [name for name in names if name in there]:
            raise StoreError.during(
                "write", f"{self._to}/{taken[0]}", "it is there already", "Type to=<another repository>, or remove it"
            )

    def file(self, path: Path) -> str:
        if path.stat().st_size <= SMALL:
            return self.small(path.name, path.read_bytes())
        operation = self._client.CommitOperationAdd(path.name, str(path))
        self._ask("write", lambda: self._hub.preupload_lfs_files(additions=[operation], **self._where))
        self._operations.append(operation)
        return f"{self._to}/{path.name}"

    def small(self, name: str, data: bytes) -> str:
        self._operations.append(self._client.CommitOperationAdd(name, data))
        return f"{self._to}/{name}"

    def finish(self) -> None:
        facts = {"operations": self._operations, "commit_message": "Export of dtrain"}
        self._ask("write", lambda: self._hub.create_commit(**facts, **self._where))

    def _ask(self, what: str, act: Any) -> Any:
        try:
            return act()
        except (OSError, ValueError) as error:  # its own are of both classes
            refused = getattr(getattr(error, "response", None), "status_code", None) in (401, 403)
            hint = "Type hf auth login, or set HF_TOKEN to a token that may write there" if refused else ""
            raise StoreError.during(what, self._to, first_line(error).rstrip("."), hint) from error
