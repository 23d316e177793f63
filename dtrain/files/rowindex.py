"""Where the rows of files are: facts of each file and, for files of lines, the offsets of its rows. Made once for each
file, and kept in the cache under the digest of its URL and of how it is read.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dtrain import secrets
from dtrain.errors import ChangedError, StoreError, WordsError, nearest
from dtrain.secrets import screen
from dtrain.storage import caching, store

VERSION = 2
PACKED_ENDS = (".gz", ".bz2", ".xz", ".zst", ".zip")
NAMED = 3
"""Files that a sentence names."""
SLOW = 3.0
"""Seconds after which a user is told that an index is being made."""
Indices = NDArray[np.int64]
Columns = dict[str, Any]
"""Name -> the values of some rows: an array [rows, ...] of int64 or fp32, or a list of arrays or texts."""


class File(Protocol):
    """A file of rows."""

    @property
    def url(self) -> str: ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """`sizes`: rows of each block, which is read at once; `bytes` of each; `sha256`; `kinds` of columns: whole,
        fraction, text, list of one of these, or another name; `largest` and `smallest` number of a column of integers.
        """
        ...

    def digest(self, rows: int | None = None) -> str:
        """A digest of the file, or of the file that it was when it had that many rows; empty if that is not known."""
        ...

    def first(self, rows: int) -> Mapping[str, Any]:
        """The facts of the file when it had that many rows, of which there is a digest."""
        ...

    def read(self, block: int, index: Indices) -> Columns:
        """The columns of rows of a block, by their place in it. Raises PreflightError for values that are missing."""
        ...

    def where(self, row: int) -> str:
        """Where a user finds a row of the file: its line, if it has one."""
        ...


def found(paths: str | Sequence[str], suffixes: Sequence[str] = ()) -> list[str]:
    """The files of paths, URLs and globs, in this order. Of several that one matches, those with these suffixes alone,
    if there are any, and none whose name, or that of a folder below, begins with a dot, if there are others. Raises
    StoreError if one matches nothing.
    """
    return matched(paths, suffixes)[0]


def matched(paths: str | Sequence[str], suffixes: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """(as `found`, a sentence about the files that match and are not read, if there are any)."""
    files, others = dict[str, None](), list[str]()
    for path in [paths] if isinstance(paths, str) else paths:
        matches = store.find(path)
        if not matches:
            raise StoreError.during("find", path, "no file is there")
        fit = [url for url in matches if url.lower().endswith(tuple(suffixes))] or matches
        hidden = _hidden(fit)
        fit = [url for url in fit if url not in hidden] or fit
        files |= dict.fromkeys(fit)
        others += [url for url in matches if url not in files]
    if not files:
        raise WordsError("data.path is empty. Type data.path=<a file, folder or pattern>.")
    return [*files], unread(others, suffixes)


def _hidden(urls: Sequence[str]) -> set[str]:
    """Those with a name that begins with a dot, below the folder that has all of them."""
    parts = [url.split("/") for url in urls]
    folders = zip(*(names[:-1] for names in parts), strict=False)
    above = sum(1 for _ in takewhile(lambda names: len({*names}) == 1, folders))
    return {url for url, names in zip(urls, parts, strict=True) if any(name.startswith(".") for name in names[above:])}


def unread(others: Sequence[str], suffixes: Sequence[str] = ()) -> list[str]:
    """A sentence that names files which match a path and are not read; none if there are none. What is packed, and
    else has a name of the right kind, comes first.
    """
    if not others:
        return []
    packed = [
        url
        for url in others
        if url.lower().endswith(PACKED_ENDS) and url.lower().rpartition(".")[0].endswith(tuple(suffixes))
    ]
    names = [url.rpartition("/")[2] for url in dict.fromkeys([*packed, *others])]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    mend = " What is packed has to be unpacked to be read." if packed else ""
    return [f"data.path: {len(names)} file(s) that it matches are not read: {', '.join(names[:NAMED])}{more}.{mend}"]


def kept(
    cache: Path, url: str, how: Sequence[Any], make: Callable[[Path], Mapping[str, Any]], beside: Sequence[str] = ()
) -> tuple[dict[str, Any], Path]:
    """(facts, the folder's path without suffix) of a file's index: `make(path)` is called, with the path, by the first
    process that needs it, or when the file has changed. `beside`: suffixes of other files that it makes. Raises
    StoreError.
    """
    at = stem(cache, url, how)
    with caching.locked(at):
        now, facts = store.fingerprint(url), facts_of(at)
        if facts is None or facts["fingerprint"] != now or not all(Path(f"{at}{end}").exists() for end in beside):
            with telling(f"making the index of {secrets.masked(url)}, once; it takes a while"):
                made = make(at)
            facts = {"path": secrets.masked(url), "fingerprint": now, **made}
            store.write(f"{at}.json", json.dumps(facts).encode())
    return facts, at


@contextmanager
def telling(sentence: str) -> Iterator[None]:
    """A context that writes a sentence to stderr if it takes longer than a few seconds."""
    timer = threading.Timer(SLOW, lambda: screen.complain(sentence))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def present(url: str) -> str:
    """The fingerprint of the file at `url`; empty if it was removed. Raises StoreError."""
    try:
        return store.fingerprint(url)
    except StoreError as error:
        if error.kind == "missing":
            return ""
        raise


def removed(url: str) -> ChangedError:
    """The error for a file that a run reads and that is there no more."""
    return ChangedError(
        f"data.path={url} was removed while the run reads it. Put it back and start again: the run goes on from its "
        "last checkpoint."
    )


def unchanged(url: str, fingerprint: str) -> None:
    """Raises ChangedError if the file at `url` is another than its index says, or is there no more."""
    now = present(url)
    if not now:
        raise removed(url)
    if now != fingerprint:
        raise ChangedError(
            f"data.path={url} changed since its index was made. Leave the file as it is while a run reads it, and "
            "start again."
        )


def alike(arrays: Sequence[NDArray[Any]]) -> Any:
    """One array of arrays that have one shape, else the list of them."""
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else [*arrays]


def column(name: str, names: Sequence[str], where: str) -> None:
    """Raises WordsError for a column that is not one of `names`, or is two of them."""
    if names.count(name) > 1:
        raise WordsError(f"{where} has {names.count(name)} columns of the name {name}. Rename one.")
    if name not in names:
        raise WordsError(f"{where} has no column {name}.{nearest(name, names)}")


def stem(cache: Path, url: str, how: Sequence[Any]) -> Path:
    """Where the index of a file is kept, without suffix."""
    return cache / hashlib.sha256(json.dumps([VERSION, url, *how]).encode()).hexdigest()[:32]


def facts_of(stem: Path) -> dict[str, Any] | None:
    """The facts of an index; None if there is none."""
    try:
        facts: dict[str, Any] = json.loads(Path(f"{stem}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and {"fingerprint", "sizes", "sha256", "kinds"} <= {*facts} else None


def save(stem: Path, table: NDArray[np.int64], names: Sequence[bytes]) -> None:
    """Write the arrays of an index: `table`, and the names that it divides."""
    for end, data in ((".npy", None), (".names", b"".join(names))):
        part = Path(f"{stem}{end}.part")
        with part.open("wb") as file:
            np.save(file, table) if data is None else file.write(data)
        part.replace(part.with_suffix(""))


def forget(stem: str) -> None:
    """Have the next run make an index again."""
    Path(f"{stem}.json").unlink(missing_ok=True)
