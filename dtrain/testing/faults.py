"""Faults at a step, at an operation on the local disk, or in a file. They are real: a signal, a dead process, lost
bytes.

python -m dtrain devices=2 strategy=ddp hook.fault._target_=dtrain.testing.faults.AtStep hook.fault.action=kill
hook.fault.step=5 hook.fault.rank=1

with faults.crashing(out, at=17) as disk:            # the local disk fails at operation 17, counted from 0
    with contextlib.suppress(faults.Crash):
        store.publish(f"{out}/a", b"x")
disk.cut_power(seed=1)                               # some unsynced data is lost too
"""

import errno
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

from dtrain.storage import store
from dtrain.storage.disk import Disk


class FaultError(RuntimeError):
    """The error of the action `raise`, like an error in a rank's own code."""


class Crash(BaseException):
    """Simulates the death of the process: `except Exception` does not catch it, and no later data reaches the disk."""


class Step(Protocol):
    """The part of a hook's StepInfo that is used here."""

    @property
    def step(self) -> int: ...


def strike(action: str) -> None:
    """Inject a fault into this process: kill (SIGKILL), stop (SIGSTOP), sigterm, raise (FaultError), hang (forever), or
    an OSError by its name, such as ENOSPC or EIO.
    """
    _check_action(action)
    if action not in ACTIONS:
        number = getattr(errno, action)
        raise OSError(number, os.strerror(number))
    ACTIONS[action]()


def _check_action(action: str) -> None:
    """Raises ValueError for an unknown action."""
    if action not in ACTIONS and action not in errno.errorcode.values():
        raise ValueError(f"there is no fault {action}. Allowed: {', '.join(ACTIONS)}, and the names in errno")


def _send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise() -> NoReturn:
    raise FaultError("an injected fault")


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": _send(signal.SIGKILL), "stop": _send(signal.SIGSTOP), "sigterm": _send(signal.SIGTERM), "raise": _raise,
    "hang": _hang,
}  # fmt: skip


@dataclass(frozen=True)
class AtStep:
    """A hook: `action` on rank `rank` (None: on all) after step `step`, before its checkpoint.

    It strikes only in the first start of the ranks, not after a restart. With `once`, the path of a file, it strikes
    only if the file does not exist, and creates it: once for all restarts, and for all commands with the same path.
    """

    about: ClassVar[Mapping[str, Any]] = {"figures": {}}
    every: ClassVar[int] = 1
    action: str
    step: int
    rank: int | None = 0
    once: str | None = None

    def __post_init__(self) -> None:
        _check_action(self.action)

    def __call__(self, info: Step) -> None:
        here = self.rank is None or self.rank == int(os.environ.get("RANK", "0"))
        if here and info.step == self.step and self._first():
            strike(self.action)

    def _first(self) -> bool:
        if self.once is None:
            return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        try:
            Path(f"{self.once}-{os.environ.get('RANK', '0')}" if self.rank is None else self.once).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@dataclass(eq=False)
class _File:
    """The bytes of a file: those written, and those that survive a power cut. `past`: the file existed before, and may
    be changed without the store.
    """

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    past: bool = False


@dataclass(eq=False)
class _Folder:
    """The entries of a folder: as programs see them, and as they are after a power cut."""

    names: dict[str, "_File | _Folder"] = field(default_factory=dict)
    durable: dict[str, "_File | _Folder"] = field(default_factory=dict)


class CrashingDisk(Disk):
    """A Disk that counts its operations and fails at the `at`-th, counted from 0: half of a write is done, and nothing
    of any other operation.

    It records which data under `root` was synced, and keeps all bytes in memory. Data written without the store, such
    as an appended log, counts as synced.
    """

    def __init__(self, root: Path, at: int | None, action: str) -> None:
        self.root, self.operations = root, list[str]()
        """`operations`: those begun, such as `write /run/a`."""
        self._at, self._action, self._dead = at, action, False
        self._lock, self._open = threading.RLock(), dict[int, tuple[_File, Path]]()
        root.mkdir(parents=True, exist_ok=True)
        self._tree = _scan(root)

    def mkdir(self, path: Path) -> None:
        with self._lock:
            self._step("mkdir", path)
            new = not path.is_dir()
            super().mkdir(path)
            if new and (folder := self._folder(path.parent)):
                folder.names[path.name] = _Folder()

    def create(self, path: Path) -> int:
        with self._lock:
            self._step("create", path)
            descriptor = super().create(path)
            file = _File()
            if folder := self._folder(path.parent):
                folder.names[path.name] = file
            self._open[descriptor] = file, path
            return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        with self._lock:
            file, path = self._open[descriptor]
            if len(self.operations) == self._at and not self._dead and self._action not in ("stop", "sigterm", "hang"):
                file.data += data[: super().write(descriptor, data[: data.nbytes // 2])]
            self._step("write", path)
            taken = super().write(descriptor, data)
            file.data += data[:taken]
            return taken

    def fsync(self, descriptor: int) -> None:
        with self._lock:
            file, path = self._open[descriptor]
            self._step("fsync", path)
            super().fsync(descriptor)
            file.durable = bytes(file.data)

    def link(self, old: Path, new: Path) -> None:
        with self._lock:
            self._step("link", new)
            super().link(old, new)
            self._move(old, new, keep=True)

    def replace(self, old: Path, new: Path) -> None:
        with self._lock:
            self._step("replace", new)
            super().replace(old, new)
            self._move(old, new, keep=False)

    def unlink(self, path: Path) -> None:
        self._remove("unlink", super().unlink, path)

    def rmdir(self, path: Path) -> None:
        self._remove("rmdir", super().rmdir, path)

    def sync(self, folder: Path) -> None:
        with self._lock:
            self._step("sync", folder)
            super().sync(folder)
            if known := self._folder(folder):
                known.durable = dict(known.names)

    def cut_power(self, seed: int | None = None) -> None:
        """Simulate a power cut: `root` keeps all that was synced and, with a seed, a random part of the rest.

        The unsynced end of a file may be missing in part, or be zero. Changes of names survive in any order.
        """
        chance = random.Random(seed) if seed is not None else None
        _refresh(self._tree, self.root)
        known = set(_paths(self._tree, self.root))
        past = {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file() and path not in known}
        shutil.rmtree(self.root)
        self.root.mkdir()
        for path, data in (_survivors(self._tree, self.root, chance) | past).items():
            (path if data is None else path.parent).mkdir(parents=True, exist_ok=True)
            if data is not None:
                path.write_bytes(data)

    def _step(self, name: str, path: Path) -> None:
        if not self._dead:
            self.operations.append(f"{name} {path}")
            if len(self.operations) - 1 == self._at and self._action != "crash":
                strike(self._action)
            self._dead = len(self.operations) - 1 == self._at and self._action == "crash"
        if self._dead:
            raise Crash(f"at operation {self._at}: {self.operations[-1]}")

    def _remove(self, name: str, act: Callable[[Path], None], path: Path) -> None:
        with self._lock:
            self._step(name, path)
            act(path)
            if folder := self._folder(path.parent):
                folder.names.pop(path.name, None)

    def _folder(self, path: Path) -> _Folder | None:
        """The record of a folder; None outside of `root`."""
        if path != self.root and self.root not in path.parents:
            return None
        here = self._tree
        for name in path.relative_to(self.root).parts:
            below = here.names.setdefault(name, _Folder())
            assert isinstance(below, _Folder)
            here = below
        return here

    def _move(self, old: Path, new: Path, *, keep: bool) -> None:
        source, target = self._folder(old.parent), self._folder(new.parent)
        if source is not None and target is not None:
            target.names[new.name] = source.names[old.name] if keep else source.names.pop(old.name)


@contextmanager
def crashing(root: str | Path, *, at: int | None = None, action: str = "crash") -> Iterator[CrashingDisk]:
    """Put a CrashingDisk under the store of this process; at=None only counts.

    Actions: crash (raise Crash; nothing reaches the disk after it), and those of `strike`.
    """
    before, store.disk = store.disk, CrashingDisk(Path(root), at, action)
    try:
        yield store.disk
    finally:
        store.disk = before


def flip(url: str, bit: int = 0) -> None:
    """Flip one bit of a file, counted from its beginning; the number wraps around at its end."""
    data = bytearray(store.read(url))
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    _overwrite(url, bytes(data))


def truncate(url: str, size: int) -> None:
    """Keep the first `size` bytes of a file; a negative size counts from its end."""
    _overwrite(url, store.read(url)[:size])


def empty(url: str) -> None:
    """Make a file empty."""
    _overwrite(url, b"")


def swap(one: str, other: str) -> None:
    """Swap the contents of two files."""
    data = store.read(one)
    _overwrite(one, store.read(other))
    _overwrite(other, data)


def lose(url: str) -> None:
    """Remove a file."""
    store.remove(url)


def _overwrite(url: str, data: bytes) -> None:
    if store.is_local(url):
        store.local_path(url).write_bytes(data)
    else:
        store.write(url, data)


def _scan(root: Path) -> _Folder:
    names: dict[str, _File | _Folder] = {
        path.name: _scan(path) if path.is_dir() else _existing(path) for path in root.iterdir()
    }
    return _Folder(names, dict(names))


def _existing(path: Path) -> _File:
    data = path.read_bytes()
    return _File(bytearray(data), data, past=True)


def _refresh(folder: _Folder, at: Path) -> None:
    """Update files that existed before with changes that were made without the store."""
    for name, node in list(folder.names.items()):
        if isinstance(node, _Folder):
            _refresh(node, at / name)
        elif node.past and (at / name).exists():
            folder.names[name] = folder.durable[name] = _existing(at / name)
        elif node.past:
            del folder.names[name], folder.durable[name]


def _paths(folder: _Folder, at: Path) -> Iterator[Path]:
    for name, node in folder.names.items():
        yield at / name
        if isinstance(node, _Folder):
            yield from _paths(node, at / name)


def _survivors(folder: _Folder, at: Path, chance: random.Random | None) -> dict[Path, bytes | None]:
    """A folder after the power cut: path -> bytes of a file, or None of a folder; parents come first."""
    names = dict(folder.durable)
    for name in {**folder.durable, **folder.names}:
        if chance and chance.random() < 0.5:  # this change reached the disk by itself
            names.pop(name, None)
            names |= {name: folder.names[name]} if name in folder.names else {}
    contents = dict[Path, bytes | None]()
    for name, node in names.items():
        if isinstance(node, _Folder):
            contents |= {at / name: None, **_survivors(node, at / name, chance)}
        else:
            contents[at / name] = _bytes(node, chance)
    return contents


def _bytes(file: _File, chance: random.Random | None) -> bytes:
    tail = bytes(file.data[len(file.durable) :])
    if chance is None:
        return file.durable
    kept = tail[: chance.randint(0, len(tail))]
    return file.durable + (kept + bytes(len(tail) - len(kept)) if chance.random() < 0.5 else kept)
