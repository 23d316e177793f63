"""Samples in tar shards, as webdataset writes them: members with one name and several endings. The headers of a shard
are read once; then any image is read by its place, by a ranged request from other storage.

    000.tar: a.jpg a.cls b.jpg b.cls ...        the image and the class of a, of b, ...
"""

import hashlib
import itertools
import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import PreflightError
from dtrain.files import rowindex
from dtrain.files.imagefiles import MAGIC, SUFFIXES, numbered, shown
from dtrain.files.linekinds import once
from dtrain.files.packed import PACKED
from dtrain.files.rowindex import Indices
from dtrain.storage import store

NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)", re.DOTALL)
"""Sample and ending, as webdataset divides a member's name: at the first dot of its last part."""
BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
MOST = 1_000_000
"""Shards that braces may name."""
STREAMS = 16
BLOCK = 1 << 20
"""Bytes that are read at once from other storage while an index is made."""
SMALL = 1 << 16
"""Bytes that a member with a class has at most."""
OPEN = 64
END = bytes(512)
Samples = tuple[list[tuple[int, int, int, int]], list[bytes], list[str]]
"""[(offset, bytes, label, end of its name)], names, labels"""


@dataclass(frozen=True)
class Shards:
    """Images in tar files. `stems`: where the index of each is; `codes`: the class of each of its labels."""

    urls: Sequence[str]
    facts: Sequence[Mapping[str, Any]]
    stems: Sequence[str] = field(repr=False)
    classes: Sequence[str] | int
    codes: Sequence[Sequence[int]] = field(repr=False)
    notes: list[str] = field(default_factory=list)
    """A sentence about files that match the path and are not read."""

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(json.dumps([facts["sha256"] for facts in self.facts]).encode())
        return digest.hexdigest()

    @property
    def blocks(self) -> None:
        return None

    def __len__(self) -> int:
        return int(_ends(tuple(facts["sizes"][0] for facts in self.facts))[-1])

    def labels(self, index: Indices) -> Indices:
        labels = [self.codes[shard][int(self._rows(shard)[row, 2])] for shard, row in self._places(index)]
        return np.array(labels, np.int64)

    def read(self, index: Indices) -> list[bytes]:
        places = list(self._places(index))
        if all(map(store.is_local, self.urls)):
            return [self._read(*place) for place in places]
        with ThreadPoolExecutor(STREAMS) as pool:
            return list(pool.map(self._read, *zip(*places, strict=True)))

    def name(self, number: int) -> str:
        ((shard, row),) = self._places(np.array([number]))
        begin = int(self._rows(shard)[row - 1, 3]) if row else 0
        name = _names(self.stems[shard], self.facts[shard]["sha256"])[begin : int(self._rows(shard)[row, 3])]
        return f"{self.urls[shard]}: {shown(name.decode(errors='surrogateescape'))}"

    def _places(self, index: Indices) -> Iterator[tuple[int, int]]:
        """(shard, sample in it) of each."""
        ends = _ends(tuple(facts["sizes"][0] for facts in self.facts))
        owner = np.searchsorted(ends, index, side="right")
        begins = np.concatenate([[0], ends])[owner]
        return zip(owner.tolist(), (index - begins).tolist(), strict=True)

    def _rows(self, shard: int) -> NDArray[np.int64]:
        return _rows(self.stems[shard], self.facts[shard]["sha256"])

    def _read(self, shard: int, row: int) -> bytes:
        url, (begin, size) = self.urls[shard], self._rows(shard)[row, :2].tolist()
        if store.is_local(url):
            rowindex.unchanged(url, self.facts[shard]["fingerprint"])
            return _handle(str(store.local_path(url)), self.facts[shard]["fingerprint"]).read(begin, size)
        (data,) = store.parts(url, [begin], size)
        if len(data) < size:
            rowindex.unchanged(url, self.facts[shard]["fingerprint"])
        return data


def opened(path: str | Sequence[str], cache: Path, *, image: str, label: str) -> Shards:
    """The images of shards, whose index is made where it is missing. Raises PreflightError."""
    urls, unread = rowindex.matched(
        [each for one in ([path] if isinstance(path, str) else path) for each in expanded(one)], [".tar"]
    )
    how = ["webdataset", image, label]

    def one(url: str) -> tuple[dict[str, Any], Path]:
        return rowindex.kept(cache, url, how, lambda stem: _made(url, stem, image, label), [".npy", ".names"])

    with ThreadPoolExecutor(STREAMS) as pool:
        made = list(pool.map(one, urls))
    facts = [each for each, _ in made]
    labels = [text for each in facts for text in each["labels"]]
    numbers, classes, outputs = numbered(labels, f"data.path={path}: {label}")
    codes = np.split(np.array(numbers), np.cumsum([len(each["labels"]) for each in facts])[:-1])
    return Shards(
        urls=urls,
        facts=facts,
        stems=[str(stem) for _, stem in made],
        classes=classes or outputs,
        codes=[each.tolist() for each in codes],
        notes=unread,
    )


def expanded(path: str) -> Iterator[str]:
    """The paths that braces stand for: {000..099}. Raises PreflightError."""
    pieces = BRACES.split(path)
    ranges = [(low, int(low), int(high)) for low, high in zip(pieces[1::3], pieces[2::3], strict=True)]
    count = int(np.prod([max(0, high - first + 1) for _, first, high in ranges], dtype=object))
    if not 0 < count <= MOST:
        raise PreflightError(f"data.path={path}: the braces stand for {count} shards. Write them as {{000..099}}.")
    numbers = itertools.product(*([str(n).zfill(len(low)) for n in range(a, b + 1)] for low, a, b in ranges))
    for each in numbers:
        yield "".join(itertools.chain.from_iterable(itertools.zip_longest(pieces[::3], each, fillvalue="")))


# the index


def _made(url: str, stem: Path, image: str, label: str) -> Mapping[str, Any]:
    """Read all headers of a shard, and the labels. Raises PreflightError."""
    where = f"data.path={url}"
    beginning = store.beginning(url, 512)
    for magic, kind in PACKED.items():
        if beginning.startswith(magic):
            raise PreflightError(
                f"{where} is packed with {kind}: its members have no place. Unpack it; images are compressed already."
            )

    def read(file: Any) -> Samples | PreflightError:
        try:
            return _samples(file, where, image, label)
        except PreflightError as error:  # that of the storage is another
            return error

    if store.is_local(url):
        with store.local_path(url).open("rb") as local:
            made = read(local)
    else:
        made = store.opened(url, read, BLOCK)
    if isinstance(made, PreflightError):
        raise made
    samples, names, labels = made
    table = np.array(samples, np.int64).reshape(-1, 4)
    rowindex.save(stem, table, names)
    digest = hashlib.sha256(table.tobytes() + b"\0".join(names) + json.dumps(labels).encode())
    return {"sizes": [len(samples)], "sha256": digest.hexdigest(), "kinds": {}, "labels": labels}


def _samples(file: Any, where: str, image: str, label: str) -> Samples:
    rows, names, labels, seen = list[tuple[int, int, int, int]](), list[bytes](), dict[str, int](), set[str]()
    end, ending, (member, _, key) = 0, image, (*label.partition("."),)
    for name, parts in _groups(file, where):
        found = [each for each in parts if each == ending or (ending == "auto" and f".{each}" in SUFFIXES)]
        if name in seen:
            raise PreflightError(f"{where}: two samples have the name {shown(name)}. Rename the members of one.")
        seen.add(name)
        if len(found) != 1:
            what = f"no image (.{', .'.join(parts)})" if not found else f"several images (.{', .'.join(found)})"
            hint = _dotted(name, parts) or "Type data.image=<the ending of one>."
            raise PreflightError(f"{where}: sample {shown(name)} has {what}. {hint}")
        if member not in parts:
            raise PreflightError(
                f"{where}: sample {shown(name)} has no .{member}, only .{', .'.join(parts)}. Type data.label=<the "
                "ending of its class>, or json.<a field>."
            )
        begin, size = parts[found[0]]
        _check_image(file, begin, size, f"{where}: {shown(name)}.{found[0]}")
        text = _label(file, *parts[member], key, f"{where}: {shown(name)}.{member}")
        path = f"{name}.{found[0]}".encode(errors="surrogateescape")
        end += len(path)
        names.append(path)
        rows.append((begin, size, labels.setdefault(text, len(labels)), end))
    if not rows:
        raise PreflightError(f"{where}: the shard has no sample.")
    return rows, names, [*labels]


def _dotted(name: str, parts: Mapping[str, Any]) -> str:
    """A sentence about a dot in the names of a sample, behind which all of it is read as an ending."""
    ending = next((each for each in parts if each.endswith(SUFFIXES)), None)
    if ending is None:
        return ""
    whole = f"{name.rpartition('/')[2]}.{ending}"
    stem, _, end = whole.rpartition(".")
    return (
        f"The ending of a name is all behind its first dot, as webdataset reads it, so {shown(whole)} is no image. "
        f"Write the shard again with names such as {shown(stem.replace('.', '_'))}.{end}."
    )


def _groups(file: Any, where: str) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """(name, ending -> (offset, bytes)) of each sample."""
    last, parts = "", dict[str, tuple[int, int]]()
    for info in _members(file, where):
        match = NAME.fullmatch(info.name)
        if match is None or match[1].rpartition("/")[2].startswith("__"):  # as webdataset passes over
            continue
        name, ending = match[1], match[2].lower()
        if name != last:
            if parts:
                yield last, parts
            last, parts = name, {}
        if ending in parts:
            raise PreflightError(f"{where}: two members have the name {shown(info.name)}. Rename one.")
        parts[ending] = info.offset_data, info.size
    if parts:
        yield last, parts


def _members(file: Any, where: str) -> Iterator[tarfile.TarInfo]:
    """The files in a shard. Raises PreflightError for one that has no place, and where the shard is torn."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    archive, end = None, 0
    try:
        archive = tarfile.TarFile(fileobj=file, mode="r")
        while (info := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined] # it would keep all of them
            end = archive.offset
            if info.issparse() or info.type == tarfile.GNUTYPE_SPARSE:
                raise PreflightError(f"{where}: {shown(info.name)} is sparse. Write the shard again with plain files.")
            if info.islnk() or info.issym():
                raise PreflightError(
                    f"{where}: {shown(info.name)} is a link to {shown(info.linkname)}. Write the shard again with "
                    "tar --dereference --hard-dereference."
                )
            if info.offset_data + info.size > size:
                raise tarfile.ReadError("unexpected end of data")
            if info.isreg():
                yield info
        end = archive.offset
    except (tarfile.TarError, EOFError, ValueError) as error:
        at = end if archive is not None else 0
        raise PreflightError(
            f"{where} is {'torn' if at else 'no tar file'}, at byte {at} of {size}: {error}."
        ) from None
    file.seek(end)
    if file.read(len(END)) != END:
        raise PreflightError(f"{where} is torn: at byte {end} of {size} there is neither a member nor its end.")
    if file.read(BLOCK).strip(b"\0"):
        raise PreflightError(
            f"{where}: something follows its end at byte {end}. Name shards one by one instead of joining them."
        )


def _check_image(file: Any, begin: int, size: int, where: str) -> None:
    file.seek(begin)
    if size and not file.read(min(4, size)).startswith(MAGIC):
        raise PreflightError(f"{where} is no image. Write the shard again without it.")
    if not size:
        raise PreflightError(f"{where} is empty. Write the shard again without it.")


def _label(file: Any, begin: int, size: int, key: str, where: str) -> str:
    """The text of a label; `key`: a field of JSON. Raises PreflightError."""
    if size > SMALL:
        raise PreflightError(f"{where} has {size} bytes, too many for a class. Type data.label=<another ending>.")
    file.seek(begin)
    data = file.read(size)
    try:
        text: Any = data.decode().strip()
        if key or where.endswith(".json"):
            fields = json.loads(text, object_pairs_hook=once)
            text = fields
            for part in key.split(".") if key else ():
                text = text[part]
            if isinstance(text, bool) or (isinstance(text, float) and text.is_integer()):
                text = int(text)
            if isinstance(text, dict | list | float) or text is None:
                has = f"It has {', '.join(fields)}. " if isinstance(fields, dict) else ""
                raise PreflightError(f"{where}: no class is there. {has}Type data.label=json.<a field>.")
    except (KeyError, TypeError):
        raise PreflightError(
            f"{where} has no {key}, only {', '.join(fields)}. Type data.label=json.<a field>."
        ) from None
    except ValueError as error:
        raise PreflightError(f"{where} cannot be read: {error}.") from None
    if text == "":
        raise PreflightError(f"{where} is empty, so its image has no class.")
    return str(text)


# in each process


@lru_cache(1)
def _ends(sizes: tuple[int, ...]) -> Indices:
    return np.cumsum(sizes)


@lru_cache(None)  # their memory is the page cache
def _rows(stem: str, digest: str) -> NDArray[np.int64]:
    """[samples, (offset, bytes, label, end of its name)]"""
    rows: NDArray[np.int64] = np.load(f"{stem}.npy", mmap_mode="r", allow_pickle=False)
    return rows


@lru_cache(OPEN)
def _names(stem: str, digest: str) -> bytes:
    return Path(f"{stem}.names").read_bytes()


class _Handle:
    """An open file, which is closed with the last reference to it."""

    def __init__(self, path: str) -> None:
        self._number = os.open(path, os.O_RDONLY)

    def read(self, begin: int, size: int) -> bytes:
        return os.pread(self._number, size, begin)

    def __del__(self) -> None:
        os.close(self._number)


@lru_cache(OPEN)
def _handle(path: str, fingerprint: str) -> _Handle:
    return _Handle(path)
