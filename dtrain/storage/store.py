"""Files at URLs of fsspec: temporary errors are retried, others become one line, a file is published whole or not."""

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from dtrain.errors import StoreError
from dtrain.storage.clients import anchored, client, connect, is_local, is_object_store, local_path, use
from dtrain.storage.disk import Buffer, Disk, a_file, create, makedirs, place, with_room
from dtrain.storage.disk import remove as remove_local
from dtrain.storage.errors import explain
from dtrain.storage.patience import elsewhere, on_disk, patience, starting

__all__ = [
    "anchored", "beginning", "children", "client", "connect", "disk", "download", "ending", "exists", "find",
    "fingerprint", "folders", "fsync", "is_local", "join", "local_path", "opened", "parts", "patience", "probe",
    "publish", "put", "read", "remove", "scratch", "size", "sizes", "small", "starting", "sync_folder", "tree",
    "upload", "use", "write",
]  # fmt: skip

T = TypeVar("T")
ABSENT = (FileNotFoundError, NotADirectoryError)
ANSWER_SECONDS = 15.0
"""Time limit for a small file, with all retries, where a person waits."""
BLOCK, STREAMS = 1 << 20, 16
"""On other storage: bytes read at once, and folders listed at once."""

disk = Disk()
"""All changes to a local disk go through it: `dtrain.testing.faults` replaces it."""


def join(url: str, *parts: str) -> str:
    return "/".join([url.rstrip("/"), *parts])


def read(url: str) -> bytes:
    """The whole file. Raises StoreError."""
    if is_local(url):
        return on_disk("read", url, lambda path: a_file(path).read_bytes())
    return elsewhere("read", url, lambda fs, path: bytes(fs.cat_file(path)))


def beginning(url: str, count: int, heard: Callable[[int], object] = int) -> bytes:
    """The first `count` bytes of a file, which may be larger than memory, or the whole file if it is shorter. `heard`
    is called with the size of each part that arrives. Raises StoreError.
    """

    def head(file: Any) -> bytes:
        parts = list[bytes]()
        with file:
            # a web server sends parts of any size
            while (missing := count - sum(map(len, parts))) and (part := file.read(min(missing, BLOCK))):
                parts.append(part)
                heard(len(part))
        return b"".join(parts)

    if is_local(url):
        return on_disk("read", url, lambda path: head(a_file(path).open("rb")))
    block = 0 if url.startswith(("http://", "https://")) else BLOCK  # many servers do not support ranges

    def opened(fs: Any, path: str) -> bytes:
        try:
            return head(fs.open(path, "rb", block_size=block))
        except FileNotFoundError as error:  # on the web it may also hide a failed connection
            hidden = error.__cause__ if getattr(error.__cause__, "status", 0) != 404 else None
            raise hidden or error from None

    return elsewhere("read", url, opened)


def ending(url: str, count: int) -> bytes:
    """The last `count` bytes of a file, or the whole file if it is shorter. Raises StoreError."""

    def tail(path: Path) -> bytes:
        with a_file(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - count))
            return file.read(count)

    if is_local(url):
        return on_disk("read", url, tail)
    return elsewhere("read", url, lambda fs, path: bytes(fs.tail(path, count)))


def parts(url: str, begins: Sequence[int], count: int) -> list[bytes]:
    """`count` bytes of a file from each of `begins` on. Raises StoreError."""

    if is_local(url):
        with on_disk("read", url, lambda path: a_file(path).open("rb")) as file:
            return on_disk("read", url, lambda path: [file.read(count) for begin in begins if file.seek(begin) >= 0])
    ends = [begin + count for begin in begins]
    return elsewhere(
        "read", url, lambda fs, path: fs.cat_ranges([path] * len(ends), list(begins), ends, on_error="raise")
    )


def opened(url: str, act: Callable[[Any], T], block: int = 0) -> T:
    """Call `act` with a file of other storage; a read is one request, or one of `block` bytes. Raises StoreError."""

    def whole(fs: Any, path: str) -> T:
        with fs.open(path, "rb", cache_type="blockcache" if block else "none", block_size=block or BLOCK) as file:
            return act(file)

    return elsewhere("read", url, whole)


def small(url: str, most: int, *, seconds: float | None = None, pace: float = math.inf) -> bytes:
    """The first `most` bytes of a small file, as `beginning` reads it. A remote file is read in another thread, and
    this one waits at most ANSWER_SECONDS, because a server may not answer or may send very slowly; plus one second for
    every `pace` bytes that arrive. Raises StoreError.
    """
    seconds = ANSWER_SECONDS if seconds is None else seconds
    if is_local(url):
        return beginning(url, most)
    answer, come, began = Future[bytes](), list[tuple[float, int]](), time.monotonic()

    def ask() -> None:
        try:
            answer.set_result(beginning(url, most, lambda count: come.append((time.monotonic(), count))))
        except BaseException as error:
            answer.set_exception(error)

    def left() -> float:
        latest, bytes_ = max(come, default=(began, 0))[0], sum(count for _, count in come)
        return min(began + bytes_ / pace, latest) + seconds - time.monotonic()

    Thread(target=ask, daemon=True).start()
    while (wait := left()) > 0:
        with contextlib.suppress(TimeoutError):
            return answer.result(wait)
    raise StoreError.during("read", url, f"no answer within {time.monotonic() - began:.3g} s", kind="busy")


def exists(url: str) -> bool:
    if is_local(url):
        return on_disk("look at", url, Path.exists)
    return elsewhere("look at", url, _info) is not None


def find(url: str) -> list[str]:
    """The files that match a URL or glob, sorted by name; a folder stands for every file below it."""

    def look(fs: Any, path: str) -> list[str]:
        web = url.startswith(("http://", "https://"))
        if any(mark in path for mark in ("*[" if web else "*?[")) and (web or not fs.exists(path)):  # ?: of a query
            matches = [name for name in fs.glob(path) if fs.isfile(name)]
        elif web:  # the web has no folders: isdir would download and parse the page, and exists hides errors
            try:
                fs.info(path)
            except FileNotFoundError as error:
                raise error.__cause__ or error from None
            matches = [path]
        else:
            matches = fs.find(path) if fs.isdir(path) else [path] * fs.exists(path)
        return sorted(fs.unstrip_protocol(name).removeprefix("file://") for name in matches)

    return elsewhere("list", url, look)


def size(url: str) -> int:
    """The size of a file in bytes; -1 if it does not exist."""

    def look(fs: Any, path: str) -> int:
        entry = _info(fs, path)
        return -1 if entry is None else int(entry["size"])

    return elsewhere("look at", url, look)


def sizes(url: str) -> dict[str, int]:
    """The size in bytes of each file directly in a folder, by name, in one listing; empty if there is no such
    folder.
    """
    return {name: size for name, size in _entries(url).items() if size >= 0}


def tree(url: str, *, depth: int) -> dict[str, int]:
    """The size in bytes of every file up to `depth` levels below a folder, by its relative path; -1 for a folder, where
    the storage has folders; empty if there is no such folder. One listing request on object stores. Raises StoreError.
    """

    def flat(fs: Any, path: str) -> dict[str, int]:
        start, entries = f"{path}/", fs.find(path, detail=True).items()
        below = {name: entry for name, entry in entries if name.startswith(start)}
        return {name.removeprefix(start): int(entry["size"] or 0) for name, entry in below.items()}

    def leveled(fs: Any, path: str, depth: int) -> dict[str, int]:
        sizes = _ls(fs, path)
        folders = [name for name, size in sizes.items() if size < 0 and depth > 1]
        with ThreadPoolExecutor(STREAMS) as pool:
            trees = pool.map(lambda name: leveled(fs, f"{path}/{name}", depth - 1), folders)
            for name, below in zip(folders, trees, strict=True):
                sizes |= {f"{name}/{rest}": size for rest, size in below.items()}
        return sizes

    if is_local(url):
        return on_disk("list", url, lambda path: dict(_walk(path, depth)))
    if is_object_store(url):
        return {path: size for path, size in elsewhere("list", url, flat).items() if path.count("/") < depth}
    return elsewhere("list", url, lambda fs, path: leveled(fs, path.rstrip("/"), depth))


def children(url: str) -> list[str]:
    """The names directly below a folder; empty if there is no such folder."""
    return sorted(_entries(url))


def folders(url: str) -> list[str]:
    """The names of the folders directly below a folder; empty if there is no such folder."""
    return sorted(name for name, size in _entries(url).items() if size < 0)


def fingerprint(url: str) -> str:
    """A text that changes when the file at `url` does, as far as its storage tells: size and time, or an ETag."""
    if is_local(url):
        return on_disk("look at", url, lambda path: f"{path.stat().st_size}-{path.stat().st_mtime_ns}")
    return elsewhere("look at", url, lambda fs, path: str(fs.ukey(path)))


def write(url: str, data: bytes) -> None:
    """Write a whole file, replacing an existing one; on a local disk, a reader sees either the old bytes or the new
    ones.
    """
    if is_local(url):
        on_disk("write", url, lambda path: with_room(path, lambda: place(disk, path, data, disk.replace)))
    else:
        elsewhere("write", url, lambda fs, path: _pipe(fs, path, data))


def put(url: str, parts: Sequence[Buffer]) -> None:
    """Create a new file from buffers in one operation. On a local disk its bytes are durable at once and its name after
    `sync_folder`; on other storage both are durable, and the size is checked. The caller chooses unique names. Raises
    StoreError; on a local disk a failure leaves no file behind.
    """

    def new(path: Path) -> None:
        makedirs(disk, path.parent)
        create(disk, path, parts)

    if is_local(url):
        on_disk("create", url, new)
    else:
        data = b"".join(parts)
        elsewhere("create", url, lambda fs, path: _pipe(fs, path, data))


def publish(url: str, data: bytes, *, parents: bool = True) -> None:
    """Create a file in one operation, durably, and only if it does not exist yet. Raises StoreError of kind `exists` if
    there are other bytes; without `parents` also if the folder of a local file does not exist.

    If the same bytes are there, an earlier attempt succeeded whose answer was lost; so the bytes should identify their
    writer.
    """

    def create_only(fs: Any, path: str) -> None:
        if _info(fs, path):  # some S3 servers ignore the condition that makes a put create-only
            raise FileExistsError("it exists")
        fs.pipe_file(path, data, mode="create")

    try:
        if is_local(url):
            on_disk("create", url, lambda path: place(disk, path, data, disk.link, parents=parents))
            return
        elsewhere("create", url, create_only)
        there = read(url)
    except StoreError as refused:
        if refused.kind != "exists":
            raise
        try:
            there = read(url)
        except StoreError as error:  # if it is missing, it has been removed since
            raise refused if error.kind == "missing" else error from None
    if there != data:
        raise StoreError.during("create", url, "other bytes are there", kind="exists")


def sync_folder(url: str) -> None:
    """Make the names of files created by `put` in a folder durable. Raises StoreError. Only local disks need it."""
    if is_local(url):
        on_disk("sync", url, disk.sync)


def upload(source: Path, url: str) -> None:
    """Copy a local file to a URL."""
    if not is_local(url):
        elsewhere("write", url, lambda fs, path: fs.put_file(str(source), path))
    elif local_path(url) != source:
        write(url, source.read_bytes())


def download(url: str, target: Path) -> None:
    """Copy a URL to a local file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    elsewhere("read", url, lambda fs, path: fs.get_file(path, str(target)))


def remove(url: str) -> None:
    """Remove a file, or a folder with everything below it; durably on a local disk. It need not exist."""

    def drop(path: Path) -> None:
        if path.exists() or path.is_symlink():
            remove_local(disk, path)
            disk.sync(path.parent)

    def drop_remote(fs: Any, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if _info(fs, path):
                fs.rm(path, recursive=True)

    if is_local(url):
        on_disk("remove", url, drop)
    else:
        elsewhere("remove", url, drop_remote)


def probe(url: str) -> None:
    """Write, read back and remove a few bytes below `url`. Raises StoreError when that fails."""
    name = join(url, f".probe-{os.getpid()}")
    write(name, b"dtrain")
    if read(name) != b"dtrain":
        raise StoreError.during("read back what was written to", name, "other bytes came back")
    remove(name)


def scratch(prefix: str, *, inside: str | None = None) -> Path:
    """A new private folder on the local disk. `inside`: a parent folder that another process removes should this one be
    killed.
    """
    return Path(tempfile.mkdtemp(prefix=f"dtrain-{prefix}-", dir=inside))


def fsync(path: Path) -> None:
    """Make a local file or folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _walk(folder: Path, depth: int, above: str = "") -> Iterator[tuple[str, int]]:
    """As `tree`. Entries that are removed in the meantime are left out."""
    try:
        entries = list(os.scandir(folder))
    except ABSENT:
        return
    for entry in entries:
        if entry.is_dir():
            yield above + entry.name, -1
            if depth > 1:
                yield from _walk(folder / entry.name, depth - 1, f"{above}{entry.name}/")
        else:
            with contextlib.suppress(FileNotFoundError):
                yield above + entry.name, entry.stat().st_size


def _info(fs: Any, path: str) -> dict[str, Any] | None:
    """The entry of a path, or None. (fsspec's own `exists` takes any error for absence, and its `info` on the web.)"""
    try:
        return dict(fs.info(path))
    except ABSENT as error:
        cause = error.__cause__ if "http" in fs.protocol else None
        if cause and (isinstance(cause, OSError) or explain(cause, path).kind == "busy"):
            raise cause from None
        return None


def _entries(url: str) -> dict[str, int]:
    """The size in bytes of what is directly below a folder, by name; -1 for a folder; empty if there is no such
    folder.
    """
    if is_local(url):
        return on_disk("list", url, lambda path: dict(_walk(path, 1)))
    return elsewhere("list", url, _ls)


def _ls(fs: Any, path: str) -> dict[str, int]:
    """As `_entries`."""
    try:
        entries = list(fs.ls(path, detail=True, refresh=True))
    except ABSENT:
        return {}
    except TypeError:  # a filesystem whose ls has no refresh
        entries = list(fs.ls(path, detail=True))
    sizes = {one["name"].rstrip("/").rsplit("/", 1)[-1]: (one["type"], one.get("size")) for one in entries}
    return {name: -1 if kind == "directory" else int(size or 0) for name, (kind, size) in sizes.items()}


def _pipe(fs: Any, path: str, data: bytes) -> None:
    """Write one object and check its size: a broken connection may have left part of it."""
    fs.pipe_file(path, data)
    landed = int(fs.info(path)["size"])
    if landed != len(data):
        raise ConnectionError(f"{landed} of {len(data)} bytes landed")
