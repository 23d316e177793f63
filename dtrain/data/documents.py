"""The documents of a corpus, in an order that depends on their names and places alone: files, or the rows of a column.
They are shuffled, so that the end of the corpus is a representative sample.
"""

import hashlib
import os
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.data.order import _mix64, permute
from dtrain.errors import PreflightError
from dtrain.files import plaintext, rowindex
from dtrain.files.rowfile import kinds, reader_of
from dtrain.files.rowindex import File
from dtrain.storage import store
from dtrain.tokenizer.pool import Document

ROWS = 1024
"""Rows that are read at once."""
AHEAD = 16
"""Files that are read at once."""


@dataclass(frozen=True)
class Documents:
    """`count` documents; `states`: all that their text depends on, as JSON; `read(first)`: those from `first` on;
    `unread`: a sentence about files that match the path and are not read.
    """

    count: int
    kind: str
    states: Sequence[Any]
    read: Callable[[int], Iterator[Document]]
    unread: Sequence[str] = ()


def documents_of(path: str | Sequence[str], column: str | None, cache: Path) -> Documents:
    """The documents at `path`, or in a `column` of its rows, whose index is kept in `cache`. Raises StoreError and
    PreflightError.
    """
    if column is None:
        named, unread = _files(path)
        prints = [(name, state) for name, _, state in named]
        return Documents(
            len(named), "file", prints, lambda first: _contents([url for _, url, _ in named[first:]]), unread
        )
    reader = reader_of({"cache": str(cache)}, path, None)
    urls, unread = reader.matched(path)
    files = reader.opened(urls, [column])
    kinds([file.facts for file in files], [column], text=True)
    count = sum(sum(file.facts["sizes"]) for file in files)
    states = [column, [file.facts["sha256"] for file in files]]
    return Documents(count, "row", states, lambda first: _rows(files, column, first), unread)


def _files(path: str | Sequence[str]) -> tuple[list[tuple[str, str, str]], list[str]]:
    """(name below the common folder, URL, fingerprint of size and time) of files, ordered by a digest of the name; and
    a sentence about those that are passed over, as their names begin with a dot. Raises StoreError if a path matches
    nothing.
    """
    unread = list[str]()
    if path == "stdlib":
        root = sysconfig.get_paths()["stdlib"]
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        skip |= {"encodings", "pydoc_data"}  # tables
        urls = [str(file) for file in Path(root).rglob("*.py") if not skip & set(file.relative_to(root).parts)]
    else:
        urls, unread = rowindex.matched(path)
        root = os.path.commonpath(urls) if len(urls) > 1 else ""
    names = {url: url[len(root) :].lstrip("/") for url in urls}
    ordered = sorted(urls, key=lambda url: hashlib.sha256(names[url].encode()).digest())
    with ThreadPoolExecutor(AHEAD) as pool:
        prints = pool.map(store.fingerprint, ordered)
        return [(names[url], url, state) for url, state in zip(ordered, prints, strict=True)], unread


def _contents(urls: Sequence[str]) -> Iterator[Document]:
    """Files, read ahead."""
    with ThreadPoolExecutor(AHEAD) as pool:
        coming, rest = deque[tuple[str, Future[bytes]]](), iter(urls)
        try:
            while True:
                while len(coming) < AHEAD and (url := next(rest, None)) is not None:
                    coming.append((url, pool.submit(store.read, url)))
                if not coming:
                    return
                url, text = coming.popleft()
                data = text.result()
                if wrong := plaintext.problem(data):
                    raise PreflightError(f"data.path={url}{'' if wrong.startswith(':') else ' '}{wrong}")
                yield Document(url, data)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _rows(files: Sequence[File], column: str, first: int) -> Iterator[Document]:
    """The rows of few blocks at a time."""
    blocks = [(file, block) for file in files for block in range(len(file.facts["sizes"]))]
    for number in permute(np.arange(len(blocks)), n=max(1, len(blocks)), key=1).tolist():
        file, block = blocks[number]
        size = file.facts["sizes"][block]
        if first >= size:
            first -= size
            continue
        rows = permute(np.arange(size), n=max(1, size), key=_mix64(number))[first:]
        first, part_of = 0, f" of block {block + 1}" * (len(file.facts["sizes"]) > 1)
        for start in range(0, len(rows), ROWS):
            part = rows[start : start + ROWS]
            for row, text in zip(part.tolist(), file.read(block, part)[column], strict=True):
                # a half of a pair of surrogates is no text, which the tokenizer says
                yield Document(f"{file.url}, row {row + 1}{part_of}", text.encode(errors="surrogatepass"))
