"""The local disk: every operation that changes it, one method each, so that a test can count them, stop between two, or
drop what was not synced. `store.disk` is the instance in use.

Durable means that it survives a power cut: the bytes of a file after `fsync`, its name after `sync` of its folder.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol


class Buffer(Protocol):
    """Bytes, a bytearray, a memoryview, a numpy array: anything with the buffer protocol."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
"""Errors with which filesystems without hard links refuse to create one."""
NO_FILES = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
HANDED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Paths through which a shell passes a stream; they are read whatever kind of file they are."""
FULL = {errno.ENOSPC, errno.EDQUOT}
ROOM = ".dtrain-room"
"""Reserve files with this prefix free their space when the disk is full, for files written beside them or one folder
below.
"""
NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR}
"""Errors of a filesystem that cannot sync a folder, or of a parent folder that we may not open."""


class Disk:
    """Operations that change a local disk. A process may be killed between any two of them."""

    def mkdir(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """Create a file with durable bytes; its name is durable after a sync of the folder. On failure, the partial
        file is removed. Raises FileExistsError.
        """
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write `data` and return how many bytes were accepted."""
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
        """Make the file names in a folder durable."""
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
    """`path`, checked before it is opened. Raises OSError if it is no regular file: reading a pipe would block, reading
    a device might never end.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = NO_FILES.get(stat.S_IFMT(path.stat().st_mode))
        if kind and not str(path).startswith(HANDED):
            raise OSError(errno.EISDIR, f"it is {kind}, not a file", str(path))
    return path


def makedirs(disk: Disk, folder: Path) -> None:
    """Create a folder and its parents, durably. Folders are synced top down, including the lowest one that already
    existed, because whoever created it may have died before syncing it.
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
    os.close(_created(disk, path, parts))


def _created(disk: Disk, path: Path, parts: Sequence[Buffer]) -> int:
    """As `create`: the descriptor of the file, which is locked for as long as it is open."""
    descriptor = disk.create(path)
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for part in parts:
            view = memoryview(part)
            left = view.cast("B") if view.nbytes else view
            while left.nbytes:
                left = left[disk.write(descriptor, left) :]
        disk.fsync(descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            disk.unlink(path)
        raise
    return descriptor


def place(disk: Disk, path: Path, data: Buffer, put: Callable[[Path, Path], None], *, parents: bool = True) -> None:
    """Write `data` to a new file beside `path`, make its bytes durable, and move it to `path` with `put`, which is
    `disk.link` or `disk.replace`.
    """
    if parents:
        makedirs(disk, path.parent)
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    descriptor = _created(disk, part, [data])
    try:
        put(part, path)
    except OSError as error:
        if put != disk.link or error.errno not in NO_LINKS:
            raise
        create(disk, path, [data])
    finally:
        os.close(descriptor)
        if part.exists():
            disk.unlink(part)
    disk.sync(path.parent)


def with_room(path: Path, act: Callable[[], None]) -> None:
    """Call `act`, which writes at `path`. If the disk is full, delete reserve files and try again, as long as there are
    any.
    """
    try:
        act()
    except OSError as error:
        reserves = (room for folder in (path.parent, path.parent.parent) for room in folder.glob(f"{ROOM}*"))
        if error.errno not in FULL or not (room := next(reserves, None)):
            raise
        room.unlink(missing_ok=True)
        with_room(path, act)


def remove(disk: Disk, path: Path) -> None:
    """Remove a file, or a folder with everything below it. Others may be removing it at the same time."""
    with contextlib.suppress(FileNotFoundError):
        if not path.is_dir() or path.is_symlink():
            disk.unlink(path)
            return
        for child in sorted(path.iterdir()):
            remove(disk, child)
        disk.rmdir(path)
