"""The local disk: every operation that changes it, one method each, so that a test can count them, stop between two, or
lose what was not synced.

`store.disk` is the one in use. What is called durable here has survived a power cut: bytes after `fsync` of their file,
a name after `sync` of its folder.
"""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class Buffer(Protocol):
    """Bytes, a bytearray, a memoryview, a numpy array: anything with the buffer protocol."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
"""How filesystems without hard links refuse one."""
NO_FILES = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
HANDED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Paths that a shell hands over, which are read whatever they are."""
FULL = {errno.ENOSPC, errno.EDQUOT}
ROOM = ".dtrain-room"
"""Files that begin so keep their bytes for what must be written beside them, or one folder below, when the disk is
full.
"""
NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR}
"""How a filesystem says that it cannot sync a folder, or that a folder above ours may not be opened."""


class Disk:
    """Operations that change a local disk. Each method is one operation that may be the last one of a process."""

    def mkdir(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file. Raises FileExistsError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """How many bytes of `data` were taken."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def replace(self, old: Path, new: Path) -> None:
        old.replace(new)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def rmdir(self, path: Path) -> None:
        path.rmdir()

    def sync(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError as error:
            if error.errno in NO_FOLDER_SYNC:
                return
            raise
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in NO_FOLDER_SYNC:
                raise
        finally:
            os.close(descriptor)


def a_file(path: Path) -> Path:
    """`path`, which is to be opened. Raises OSError when something stands there that is no file: a pipe would be waited
    for, a device read without end.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = NO_FILES.get(stat.S_IFMT(path.stat().st_mode))
        if kind and not str(path).startswith(HANDED):
            raise OSError(errno.EISDIR, f"it is {kind}, not a file", str(path))
    return path


def makedirs(disk: Disk, folder: Path) -> None:
    """A folder and those above it, durably. Top down, and the lowest that was there is synced again: who made it may
    have died before.
    """
    if folder.is_dir():
        return
    missing = [folder, *(parent for parent in folder.parents if not parent.is_dir())]
    disk.sync(missing[-1].parent.parent)
    for path in reversed(missing):
        try:
            disk.mkdir(path)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        disk.sync(path.parent)


def create(disk: Disk, path: Path, parts: Sequence[Buffer]) -> None:
    """A new file with durable bytes; its name is durable after a sync of the folder. What was begun and failed is
    removed. Raises FileExistsError.
    """
    descriptor = disk.create(path)
    try:
        for part in parts:
            view = memoryview(part)
            left = view.cast("B") if view.nbytes else view
            while left.nbytes:
                left = left[disk.write(descriptor, left) :]
        disk.fsync(descriptor)
    except OSError:
        disk.unlink(path)
        raise
    finally:
        os.close(descriptor)


def place(disk: Disk, path: Path, data: Buffer, put: Callable[[Path, Path], None], *, parents: bool = True) -> None:
    """`data` in a new file beside `path`, brought there by `put`, which is `disk.link` or `disk.replace`, once its
    bytes are durable.
    """
    if parents:
        makedirs(disk, path.parent)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    create(disk, part, [data])
    try:
        put(part, path)
    except OSError as error:
        if put != disk.link or error.errno not in NO_LINKS:
            raise
        create(disk, path, [data])
    finally:
        if part.exists():
            disk.unlink(part)
    disk.sync(path.parent)


def with_room(path: Path, act: Callable[[], None]) -> None:
    """`act`, which writes at `path`; where the disk is full, again as long as there is room that was kept for it and
    can be given away.
    """
    try:
        act()
    except OSError as error:
        kept = (room for folder in (path.parent, path.parent.parent) for room in folder.glob(f"{ROOM}*"))
        if error.errno not in FULL or not (room := next(kept, None)):
            raise
        room.unlink(missing_ok=True)
        with_room(path, act)


def remove(disk: Disk, path: Path) -> None:
    """A file, or a folder with all below it. Others may be removing it as well."""
    with contextlib.suppress(FileNotFoundError):
        if not path.is_dir() or path.is_symlink():
            disk.unlink(path)
            return
        for child in sorted(path.iterdir()):
            remove(disk, child)
        disk.rmdir(path)
