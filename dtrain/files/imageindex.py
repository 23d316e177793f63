"""Where images are: the files of class folders, or those that the rows of a table name. The index is made once, kept in
the cache, and made again when files were added, removed or renamed.

    flowers/daisy/a.jpg  flowers/daisy/b.png  flowers/rose/c.jpg        classes: daisy, rose
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import ChangedError, PreflightError, StoreError
from dtrain.files import rowindex
from dtrain.files.imagefiles import (
    SUFFIXES,
    Entry,
    check_beginnings,
    is_table,
    listed,
    root_of,
    rows,
    shown,
    spread,
    unlabelled,
    url_of,
)
from dtrain.files.rowindex import Indices
from dtrain.storage import caching, store

STREAMS = 16
"""Files of other storage that are read at once."""


@dataclass(frozen=True)
class Images:
    """Image files. `beside`: the files of its index."""

    root: str
    facts: Mapping[str, Any]
    beside: str = field(repr=False)

    @property
    def classes(self) -> Sequence[str] | int:
        return list(self.facts["classes"]) or int(self.facts["outputs"])

    @property
    def notes(self) -> list[str]:
        return [self.facts["others"]] if self.facts.get("others") else []

    @property
    def digest(self) -> str:
        return str(self.facts["sha256"])

    @property
    def blocks(self) -> None:
        return None

    def __len__(self) -> int:
        return int(self.facts["sizes"][0])

    def labels(self, index: Indices) -> Indices:
        return np.asarray(_table(self.beside)[index, 3])

    def read(self, index: Indices) -> list[bytes]:
        if store.is_local(self.root):
            return [self._read(number) for number in index.tolist()]
        with ThreadPoolExecutor(STREAMS) as pool:
            return list(pool.map(self._read, index.tolist()))

    def name(self, number: int) -> str:
        ends = _table(self.beside)[max(0, number - 1) : number + 1, 0].tolist()
        begin, end = (ends[0] if number else 0), ends[-1]
        return url_of(self.root, _names(self.beside)[begin:end].decode(errors="surrogateescape"))

    def _read(self, number: int) -> bytes:
        _, size, time, _ = _table(self.beside)[number].tolist()
        url = self.name(number)
        try:
            if not store.is_local(url):
                data = store.read(url)
            else:
                with store.local_path(url).open("rb") as file:
                    state = os.fstat(file.fileno())
                    data = file.read() if time in (0, state.st_mtime_ns) else b""
        except (OSError, StoreError) as error:
            raise PreflightError(f"data.path: {shown(url)} cannot be read any more: {_why(error)}.") from None
        if len(data) != size:
            rowindex.forget(self.facts["stem"])
            raise ChangedError(
                f"data.path: {shown(url)} changed since its index was made. Leave the files as they are while a run "
                "reads them, and start again."
            )
        return data


def opened(path: str | Sequence[str], cache: Path, *, image: str, label: str | None) -> Images:
    """The images of a folder, or of a table, if its name ends as one does; `label` None: without classes. Raises
    PreflightError, with all that is wrong with a file in one sentence.
    """
    if not isinstance(path, str):
        if len(path) != 1:
            raise PreflightError(f"data.path={list(path)}: name one folder of class folders, or one table.")
        (path,) = path
    path = _absolute(path)
    stem = _stem(path, cache, image, label)
    with caching.locked(stem):
        facts = _known(stem)
        if facts is None or not _is_current(path, facts):
            folders, others = dict[str, int](), list[str]()
            if is_table(path):
                entries, classes, outputs = rows(path, cache, image, label)
            else:
                entries, classes = (
                    (unlabelled(path, folders, others), []) if label is None else listed(path, folders, others)
                )
                outputs = len(classes)
            facts = _written(
                stem,
                path,
                entries,
                classes=classes,
                outputs=outputs,
                beside={"folders": folders, "others": _said(others)},
            )
    return Images(root_of(path), facts, f"{stem}-{facts['key']}")


def _absolute(path: str) -> str:
    return str(store.local_path(path).absolute()) if store.is_local(path) else path


def _stem(path: str, cache: Path, image: str, label: str | None) -> Path:
    how = [image, label] if is_table(path) else []
    return rowindex.stem(cache, path, ["images", *(how or (["unlabelled"] if label is None else []))])


# the index


def _known(stem: Path) -> dict[str, Any] | None:
    facts = rowindex.facts_of(stem)
    if facts is None or not all(Path(f"{stem}-{facts.get('key')}{end}").exists() for end in (".npy", ".names")):
        return None
    return facts


def _is_current(path: str, facts: Mapping[str, Any]) -> bool:
    """Whether the folders, or the table, are those of the index, and files too as far as they are looked at."""
    if is_table(path) and facts["fingerprint"] != store.fingerprint(path):
        return False
    if not store.is_local(path):
        return is_table(path)  # a folder elsewhere is listed again
    root = store.local_path(root_of(path))
    try:
        if any((root / name).stat().st_mtime_ns != time for name, time in facts["folders"].items()):
            return False
        images = Images(root_of(path), facts, f"{facts['stem']}-{facts['key']}")
        for number in spread(len(images)):
            _, size, time, _ = _table(images.beside)[number].tolist()
            state = store.local_path(images.name(number)).stat() if time else None
            if state and (state.st_size, state.st_mtime_ns) != (size, time):
                return False
    except OSError:
        return False
    return True


def _written(
    stem: Path, path: str, entries: Sequence[Entry], classes: Sequence[str], outputs: int, beside: Mapping[str, Any]
) -> dict[str, Any]:
    """Keep an index, with what is known `beside` the images. Its arrays have a name of their content, because others
    may have opened older ones.
    """
    names = [name.encode(errors="surrogateescape") for name, *_ in entries]
    table = np.array([entry[1:] for entry in entries], np.int64)
    table = np.concatenate([np.cumsum([*map(len, names)])[:, None], table], 1)
    digest = hashlib.sha256(b"\0".join(names) + np.ascontiguousarray(table[:, [1, 3]]).tobytes())
    digest.update(json.dumps(classes).encode())
    key = hashlib.sha256(digest.digest() + table.tobytes()).hexdigest()[:16]
    check_beginnings(root_of(path), entries)
    for end, save in (
        (".npy", lambda file: np.save(file, table)),
        (".names", lambda file: file.write(b"".join(names))),
    ):
        part = Path(f"{stem}-{key}{end}.part")
        with part.open("wb") as file:
            save(file)
        part.replace(part.with_suffix(""))
    facts = {
        "stem": str(stem), "key": key, "sha256": digest.hexdigest(), "sizes": [len(entries)], "kinds": {},
        "classes": classes, "outputs": outputs, **beside,
        "fingerprint": store.fingerprint(path) if is_table(path) else "",
    }  # fmt: skip
    store.write(f"{stem}.json", json.dumps(facts).encode())
    return facts


def _said(others: Sequence[str]) -> str:
    """A sentence about files that are no images by their names; empty if there are none."""
    if not others:
        return ""
    files, are = ("1 file", "is") if len(others) == 1 else (f"{len(others)} files", "are")
    ends = ", ".join(SUFFIXES)
    return f"{files} in class folders, such as {shown(min(others))}, {are} passed over: names of images end in {ends}"


@lru_cache(8)
def _table(beside: str) -> NDArray[np.int64]:
    """[images, (end of its name, bytes, time, class)]"""
    table: NDArray[np.int64] = np.load(f"{beside}.npy", mmap_mode="r", allow_pickle=False)
    return table


@lru_cache(8)
def _names(beside: str) -> bytes:
    return Path(f"{beside}.names").read_bytes()


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error).rstrip(".")
