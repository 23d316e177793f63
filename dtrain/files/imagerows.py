"""Images whose bytes are in a column of Parquet files, or of a dataset of Hugging Face: binary values, or the {bytes,
path} of its Image feature.

    data=images data.path=rows/*.parquet data.image=image data.label=label
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import PreflightError, WordsError
from dtrain.files import arrowfile, rowindex
from dtrain.files.imagefiles import MAGIC, numbered, root_of, shown, url_of
from dtrain.files.rowfile import SUFFIXES, Reader
from dtrain.files.rowindex import File, Indices
from dtrain.storage import store

LOOKED_AT = 64
"""Images of each file whose beginning is looked at before the launch."""
ROWS = 4096


@dataclass(frozen=True)
class ImageRows:
    """Rows with an image each. `beside`: the file of their classes."""

    format: str
    urls: tuple[str, ...]
    image: str
    cache: Path
    facts: Mapping[str, Any]
    beside: str = field(repr=False)

    @property
    def classes(self) -> Sequence[str] | int:
        return list(self.facts["classes"]) or int(self.facts["outputs"])

    @property
    def notes(self) -> list[str]:
        return []

    @property
    def digest(self) -> str:
        return str(self.facts["sha256"])

    @property
    def blocks(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        if self.format != "parquet":
            return None
        files = self._files
        sizes, bytes_ = (tuple(each for file in files for each in file.facts[name]) for name in ("sizes", "bytes"))
        return sizes, bytes_

    def __len__(self) -> int:
        return len(_labels(self.beside))

    def labels(self, index: Indices) -> Indices:
        return np.asarray(_labels(self.beside)[index])

    def read(self, index: Indices) -> list[bytes]:
        return [self._read(number) for number in index.tolist()]

    def name(self, number: int) -> str:
        file, row = self._place(number)
        return f"{file.url}, row {row + 1}"

    def check(self) -> None:
        """Raises PreflightError for local files whose first values are no images."""
        first = 0
        for file in self._files:
            rows = sum(file.facts["sizes"])
            for number in range(first, first + min(rows, LOOKED_AT) if store.is_local(file.url) else first):
                if not self._read(number).startswith(MAGIC):
                    raise PreflightError(f"data.path: {shown(self.name(number))} is no image. Drop the row.")
            first += rows

    def _read(self, number: int) -> bytes:
        file, row = self._place(number)
        ends = np.cumsum(file.facts["sizes"])
        block = int(np.searchsorted(ends, row, side="right"))
        (value,) = file.read(block, np.array([row - (int(ends[block - 1]) if block else 0)]))[self.image]
        data = value.get("bytes") if isinstance(value, Mapping) else value
        if data is None and isinstance(value, Mapping) and value.get("path"):
            data = store.read(url_of(root_of(file.url), value["path"]))
        if not data:
            raise PreflightError(f"data.path: {self.name(number)} has no image. Drop the row.")
        return bytes(data)

    def _place(self, number: int) -> tuple[File, int]:
        """The file of a row, and its place there."""
        files = self._files
        ends = _ends(self.format, self.urls, self.image, self.cache)
        which = int(np.searchsorted(ends, number, side="right"))
        return files[which], number - (int(ends[which - 1]) if which else 0)

    @property
    def _files(self) -> Sequence[File]:
        return _opened(self.format, self.urls, self.image, self.cache)


def opened(path: str | Sequence[str], cache: Path, *, image: str, label: str | None) -> ImageRows | None:
    """The rows at a path; None if it is not one of files that hold images. Raises PreflightError and WordsError."""
    where = path if isinstance(path, str) else path[0]
    format = _format(where)
    if format is None or (not isinstance(path, str) and len(path) > 1):
        return None
    urls = tuple(_found(where, format))
    kinds = {file.facts["kinds"][image] for file in _opened(format, urls, image, cache)}
    if kinds == {"text"} and where.lower().endswith(SUFFIXES[format]):
        return None  # paths of files
    if odd := [kind for kind in kinds if "binary" not in kind]:
        raise PreflightError(f"data.image={image}: the column holds {odd[0]} values. Name one of images.")
    labelled = [] if label is None else Reader(format, cache, raw=True).opened(urls, [label])
    digest = hashlib.sha256(repr([image, label]).encode())
    for file in (*_opened(format, urls, image, cache), *labelled):
        digest.update(str(file.facts["sha256"]).encode())

    def made(stem: Path) -> Mapping[str, Any]:
        rows = sum(size for file in _opened(format, urls, image, cache) for size in file.facts["sizes"])
        numbers, classes, outputs = [0] * rows, list[str](), 0
        if label is not None:
            numbers, classes, outputs = _classes(labelled, label, f"data.path={where}: column {label}")
        part = Path(f"{stem}.part")
        with part.open("wb") as out:
            np.save(out, np.array(numbers, np.int64))
        part.replace(f"{stem}.npy")
        about = {"classes": classes, "outputs": outputs, "sha256": digest.hexdigest()}
        ImageRows(format=format, urls=urls, image=image, cache=cache, facts=about, beside=f"{stem}.npy").check()
        return {**about, "sizes": [len(numbers)], "kinds": {}}

    how = ["imagerows", image, label, digest.hexdigest()]
    facts, stem = rowindex.kept(cache, urls[0], how, made, [".npy"])
    return ImageRows(format=format, urls=urls, image=image, cache=cache, facts=facts, beside=f"{stem}.npy")


def _format(path: str) -> str | None:
    for format in ("parquet", "hf"):
        if path.lower().endswith(SUFFIXES[format]):
            return format
    return "hf" if arrowfile.is_dataset(path) else None


def _found(path: str, format: str) -> list[str]:
    if path.lower().endswith(SUFFIXES[format]):
        return rowindex.found(path, SUFFIXES[format])
    try:
        return arrowfile.shards(path, None)
    except WordsError as error:
        raise WordsError(str(error).replace("data.split=<one of them>", f"data.path={path}/<one of them>")) from None


def _classes(files: Sequence[File], label: str, where: str) -> tuple[list[int], list[str], int]:
    """The class of each row, the names of classes if they have some, and how many there are. Raises PreflightError."""
    labels = list[Any]()
    for file in files:
        for block, size in enumerate(file.facts["sizes"]):
            for start in range(0, size, ROWS):
                labels += file.read(block, np.arange(start, min(size, start + ROWS)))[label]
    if not labels:
        raise PreflightError(f"{where}: there is no row.")
    if None in labels:
        raise PreflightError(f"{where} is empty in row {labels.index(None) + 1}. Drop or fill it.")
    numbers, classes, outputs = numbered(labels, where)
    names = files[0].facts.get("classes", {}).get(label)
    if names and not classes and outputs <= len(names):
        return numbers, [*map(str, names)], len(names)
    return numbers, classes, outputs


@lru_cache(8)
def _opened(format: str, urls: tuple[str, ...], image: str, cache: Path) -> Sequence[File]:
    return Reader(format, cache, raw=True).opened(urls, [image])


@lru_cache(8)
def _ends(format: str, urls: tuple[str, ...], image: str, cache: Path) -> Indices:
    return np.cumsum([sum(file.facts["sizes"]) for file in _opened(format, urls, image, cache)])


@lru_cache(8)
def _labels(beside: str) -> NDArray[np.int64]:
    labels: NDArray[np.int64] = np.load(beside, mmap_mode="r", allow_pickle=False)
    return labels
