"""Which images are in a folder of class folders, or named by the rows of a table, and the class of each."""

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from dtrain.errors import PreflightError
from dtrain.files.rowfile import SUFFIXES as TABLES
from dtrain.files.rowfile import Reader
from dtrain.storage import clients, store, web

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
MAGIC = (
    b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"BM", b"GIF8", b"II*\x00", b"MM\x00*",
    *(b"P%d" % kind for kind in range(1, 7)),
)  # fmt: skip
"""How files of these formats begin."""
LOOKED_AT = 10_000
"""Local files whose beginning, size and time are looked at before the launch, evenly spread if there are more."""
SPLITS = {"train", "training", "val", "valid", "validation", "eval", "test", "testing", "holdout"}
DEPTH = 16
"""Folders below each other, on other storage."""
STREAMS = 16
ROWS = 4096
CLASSES = 1_000_000
"""The most classes, so that a number that is no class makes no output of the model."""
Entry = tuple[str, int, int, int]
"""Path below the root, bytes, time in ns or 0, class."""


def is_table(path: str) -> bool:
    """Whether it is a file of rows, by its name."""
    return path.lower().endswith(tuple(end for ends in TABLES.values() for end in ends))


def root_of(path: str) -> str:
    """The folder to which names are relative: that of a table is its own."""
    return (path.rpartition("/")[0] or ".") if is_table(path) else path


def url_of(root: str, name: str) -> str:
    """Where a file is. Raises PreflightError if rows name what they may not: their writer need not be who trains."""
    if reason := _refusal(root, name):
        raise PreflightError(
            f"data.path: a row at {shown(root)} names {shown(name)}, which {reason}. Name images beside the table, or "
            "by public URLs."
        )
    return name if name.startswith("/") or "://" in name else store.join(root, name)


def _refusal(root: str, name: str) -> str:
    """Why a row at `root` may not name this place; empty if it may. A table on this machine names any file of it."""
    scheme, _, rest = name.partition("://")
    if "::" in name:
        return "opens one address through another"
    if store.is_local(root) or not (rest or name.startswith(("/", "~")) or ".." in name.split("/")):
        return ""
    if scheme.lower() not in web.REACHABLE:
        return "is not of its storage"
    if scheme.lower() not in ("http", "https") or urlsplit(name).netloc == urlsplit(root).netloc:
        return ""
    if web.is_inside(urlsplit(name).hostname or ""):
        return "is of this machine or its network"
    clients.wary(name)  # nor does a redirect lead there
    return ""


def shown(name: str) -> str:
    """A name of any bytes, for a person."""
    text = os.fsencode(name).decode(errors="backslashreplace")
    return text if text.isprintable() else repr(text)[1:-1]


def spread(count: int) -> Iterable[int]:
    """The images that are looked at before the launch."""
    return range(0, count, -(-count // LOOKED_AT) or 1)


def check_beginnings(root: str, entries: Sequence[Entry]) -> None:
    """Raises PreflightError for local files that are no images."""
    wrong = list[str]()
    looked = [entries[number][0] for number in spread(len(entries))]
    for url in (url_of(root, name) for name in looked):
        if not store.is_local(url):
            continue
        try:
            with store.local_path(url).open("rb") as file:
                start = file.read(4)
        except OSError as error:
            raise PreflightError(f"data.path: {shown(url)} cannot be read: {error.strerror}.") from None
        if not start.startswith(MAGIC):
            wrong.append(f"{shown(url)} {'is no image' if start else 'is empty'}")
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise PreflightError(f"data.path: {wrong[0]}{more}. Remove what is no image.")


# folders


def listed(path: str, folders: dict[str, int], others: list[str]) -> tuple[list[Entry], list[str]]:
    """The images of class folders, sorted, and the names of the classes; `folders` gets all folders and their times,
    `others` the files there that are no images by their names. Raises PreflightError.
    """
    files, kept = _below(path, folders, others)
    below = {name.split("/")[0] for name in folders if name not in ("", ".")}
    classes = sorted(name for name in below if not name.startswith("."))
    _check_classes(path, kept, classes)
    number = {name: place for place, name in enumerate(classes)}
    return [(name, *files[name], number[name.split("/")[0]]) for name in kept], [*map(shown, classes)]


def unlabelled(path: str, folders: dict[str, int], others: list[str]) -> list[Entry]:
    """All images below a folder, sorted, as of one class; arguments as of `listed`. Raises PreflightError."""
    files, kept = _below(path, folders, others)
    _check_some(path, kept)
    return [(name, *files[name], 0) for name in kept]


def _below(
    path: str, folders: dict[str, int], others: list[str]
) -> tuple[dict[str, tuple[int, int]], list[str]]:  # fmt: skip
    """(bytes and time of the files below a folder, the images among them, sorted)."""
    files = dict[str, tuple[int, int]]()
    if store.is_local(path):
        root = store.local_path(path)
        if not root.is_dir():
            what = "this is a file, and no table" if root.exists() else "no folder is there"
            raise PreflightError(f"data.path={path}: {what}. Name a folder of class folders, or a table.")
        for name, state in _walk(root, "", {}, folders, others):
            files[name] = state.st_size, state.st_mtime_ns
    else:
        entries = store.tree(path, depth=DEPTH)
        files = {name: (size, 0) for name, size in entries.items() if size >= 0}
        folders |= {name: 0 for name, size in entries.items() if size < 0}
        folders |= {name.rpartition("/")[0]: 0 for name in files if "/" in name}
        others += [name for name in files if "/" in name and not _is_image(name) and not _is_hidden(name)]
        if not entries:
            raise PreflightError(f"data.path={path}: no folder is there.")
    return files, sorted(name for name in files if _is_image(name))


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not _is_hidden(name)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _walk(
    folder: Path, above: str, outer: Mapping[tuple[int, int], str], folders: dict[str, int], others: list[str]
) -> Iterator[tuple[str, os.stat_result]]:
    """Files below a folder. `outer`: the folders that it is in, to notice a link that leads back to one."""
    try:
        state = folder.stat()
        entries = list(os.scandir(folder))
        place = (state.st_dev, state.st_ino)
        if place in outer:
            raise PreflightError(
                f"data.path: the link {shown(str(folder))} leads back to {shown(outer[place])}. Remove it."
            )
        folders[above.rstrip("/") or "."] = state.st_mtime_ns
        for entry in entries:
            if entry.is_dir():
                if not entry.name.startswith("."):
                    inside = {**outer, place: str(folder)}
                    yield from _walk(Path(entry.path), f"{above}{entry.name}/", inside, folders, others)
            elif entry.name.lower().endswith(SUFFIXES):
                found = entry.stat()
                if not stat.S_ISREG(found.st_mode):
                    raise PreflightError(f"data.path: {shown(entry.path)} is no file. Remove what is no image.")
                yield above + entry.name, found
            elif above and not entry.name.startswith("."):
                others.append(above + entry.name)
    except OSError as error:
        raise PreflightError(
            f"data.path: {shown(str(error.filename or folder))} cannot be read: {error.strerror}."
        ) from None


def _check_classes(path: str, images: Sequence[str], classes: Sequence[str]) -> None:
    _check_some(path, images)
    alone = [name for name in images if "/" not in name]
    if not classes or len(alone) == len(images):
        raise PreflightError(
            f"data.path={path}: its {len(images)} images are in no class folder. Put those of each class into a folder "
            "of its own, or name a table with a column of paths and one of classes: data.path=labels.csv."
        )
    if alone:
        raise PreflightError(
            f"data.path={path}: {len(alone)} image(s) are beside the class folders, such as {shown(alone[0])}, and "
            "have no class. Move them."
        )
    if {name.lower() for name in classes} <= SPLITS:
        train = next((name for name in classes if "train" in name.lower()), classes[0])
        held = next((name for name in classes if name != train), "<another>")
        raise PreflightError(
            f"data.path={path}: the classes would be {', '.join(classes)}. Type data.path={store.join(path, train)} "
            f"data.holdout_path={store.join(path, held)}."
        )
    if len(classes) == 1:
        raise PreflightError(f"data.path={path}: {shown(classes[0])} is the only class, so there is nothing to learn.")
    if empty := sorted({*classes} - {name.split("/")[0] for name in images}):
        raise PreflightError(
            f"data.path={path}: {len(empty)} class folder(s) have no image, such as {shown(empty[0])}. Remove or fill "
            "them."
        )


def _check_some(path: str, images: Sequence[str]) -> None:
    if not images:
        ends = ", ".join(SUFFIXES)
        shards = store.is_local(path) and any(store.local_path(path).glob("*.tar"))
        hint = " For its tar shards type data=webdataset." if shards else ""
        raise PreflightError(f"data.path={path}: no image is there. Names of images end in {ends}.{hint}")


# tables


def rows(path: str, cache: Path, image: str, label: str | None) -> tuple[list[Entry], list[str], int]:
    """The images that the rows of a table name, the names of their classes, and how many these are; `label` None:
    all are of one class. Raises PreflightError, and WordsError for a column that is not there.
    """
    format = next(name for name, ends in TABLES.items() if path.lower().endswith(ends))
    reader = Reader(format, cache, "tab" if path.lower().endswith(".tsv") else "comma", text=True)
    (url, *others) = reader.found(path)
    if others:
        raise PreflightError(f"data.path={path}: {1 + len(others)} tables match. Name one.")
    columns = [image] if label is None else [image, label]
    (file,) = reader.opened([url], columns)
    if (kind := file.facts["kinds"].get(image, "text")) != "text":
        raise PreflightError(f"data.image={image}: the column holds {kind} values. Name one of paths.")
    paths, labels = list[str](), list[Any]()
    for block, size in enumerate(file.facts["sizes"]):
        for start in range(0, size, ROWS):
            part = file.read(block, np.arange(start, min(size, start + ROWS)))
            paths += part[image]
            if label is not None:
                labels += part[label] if isinstance(part[label], list) else part[label].tolist()
    if not paths:
        raise PreflightError(f"data.path={path}: there is no row.")
    numbers, classes, outputs = [0] * len(paths), list[str](), 0
    if label is not None:
        numbers, classes, outputs = numbered(labels, f"data.path={path}: column {label}")
    root = root_of(path)
    with ThreadPoolExecutor(STREAMS) as pool:
        states = pool.map(lambda name: _state(url_of(root, name)), paths)
        entries = [(name, *state, number) for name, state, number in zip(paths, states, numbers, strict=True)]
    if gone := [number for number, entry in enumerate(entries) if entry[1] < 0]:
        raise PreflightError(
            f"data.path={path}: {len(gone)} image(s) are not there, first in row {gone[0] + 1}: "
            f"{shown(url_of(root, paths[gone[0]]))}."
        )
    return entries, classes, outputs


def numbered(labels: Sequence[Any], where: str) -> tuple[list[int], list[str], int]:
    """The class of each label, the sorted names of the classes, none if labels are numbers, and how many there are.
    Raises PreflightError.
    """
    texts = {*map(str, labels)}
    if all(text.strip().isdecimal() for text in texts):
        largest = max(texts, key=lambda text: (len(text.strip().lstrip("0")), text))
        if len(largest.strip().lstrip("0")) > len(str(CLASSES)) or int(largest) >= CLASSES:
            raise PreflightError(
                f"{where} has the class {largest.strip()[:40]}, and a model has an output for each number up to it. "
                f"Number the {len(texts)} classes from 0 on, or give them names."
            )
        values = [int(label) for label in labels]
        classes, outputs = list[str](), max(values) + 1
    else:
        odd = next((text for text in sorted(texts) if not text.strip() or _is_number(text)), None)
        if odd is not None:
            name = next((text for text in sorted(texts) if text.strip() and not _is_number(text)), "")
            what = f"the number {odd!r} among names, such as {name!r}: classes are all numbers or all names"
            what = what if odd.strip() else "an empty label"
            if all(map(_is_number, texts)):
                wrong = next(text for text in sorted(texts) if not text.strip().isdecimal())
                what = f"{wrong}: a class is a whole number from 0 on, or a name"
            raise PreflightError(f"{where} has {what}.")
        classes = sorted(texts)
        number = {name: place for place, name in enumerate(classes)}
        values, outputs = [number[str(label)] for label in labels], len(classes)
    if len(texts) == 1:
        raise PreflightError(f"{where}: {next(iter(texts))} is the only class, so there is nothing to learn.")
    return values, classes, outputs


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _state(url: str) -> tuple[int, int]:
    """(bytes, time in ns or 0) of a file; (-1, 0) if it is not there."""
    if not store.is_local(url):
        return store.size(url), 0
    try:
        state = store.local_path(url).stat()
    except OSError:
        return -1, 0
    return (state.st_size, state.st_mtime_ns) if stat.S_ISREG(state.st_mode) else (-1, 0)
