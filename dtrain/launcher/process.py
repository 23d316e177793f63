"""Processes of one run: each dies with the one that forked it, and they share a lock that is free when all have
ended.
"""

import contextlib
import ctypes
import fcntl
import gc
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dtrain import secrets
from dtrain.cluster import network
from dtrain.launcher.title import retitle_fork
from dtrain.secrets import screen
from dtrain.storage import store

STORE_SECONDS = 10.0
"""A store process that does not listen after this time is killed."""


def fork(work: Callable[[], Any], name: str = "") -> int:
    """Fork a child that does `work`, ends, and dies when this process does; return its pid. `name`: at most 15 letters,
    for `ps` and `top`; its command line is `name` and what follows the first word of this process's title.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    gc.freeze()  # garbage of the parent stays: a process group's end would wait for threads that only the parent has
    try:
        die_with(parent)
        if name and sys.platform == "linux":
            ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME
            retitle_fork(name)
        work()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        screen.say(secrets.masked(traceback.format_exc().rstrip()), error=True)
    finally:
        with contextlib.suppress(OSError, ValueError):  # nobody reads on
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded here, because a child of a process with threads may not."""


def die_with(parent: int) -> None:
    """Linux: get SIGKILL when `parent`, which forked this process, ends."""
    if _libc:
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)


def is_gone(pid: int, seconds: float) -> bool:
    """Whether a process, which need not be a child, ends within `seconds`."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # not Linux, or one before 5.3
        deadline = time.monotonic() + seconds
        while _lives(pid):
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True
    try:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        return bool(ended.poll(seconds * 1000))
    finally:
        os.close(handle)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:  # PermissionError: it lives, and belongs to another user
        return not isinstance(error, ProcessLookupError)
    return _stat(pid, 0) != "Z"  # of a child that nobody has waited for


def parent_of(pid: int) -> int:
    """The pid of its parent; 0 if there is no such process."""
    return int(_stat(pid, 1) or 0)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by SIGSTOP or a debugger."""
    return _stat(pid, 0) in ("T", "t")


def _stat(pid: int, field: int) -> str:
    """A field of /proc/<pid>/stat, counted after the name; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[field]
    except OSError:
        return ""


def fork_store(address: str = "127.0.0.1") -> tuple[int, int]:
    """Fork a process with a rendezvous store; return its pid and the port of `address` that it listens on.

    Raises ConnectionError if it does not listen in time.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported without saying so

    reading, writing = os.pipe()

    def keep() -> None:
        os.close(reading)
        end = network.listen(address, 0)
        port = end.getsockname()[1]
        store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=end.detach())
        os.write(writing, str(store.port).encode())
        os.close(writing)
        while True:
            time.sleep(3600)

    pid = fork(keep, "dtrain-store")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        port = pipe.read() if select.select([pipe], [], [], STORE_SECONDS)[0] else ""
    if not port:
        kill(pid)
        raise ConnectionError("the store process ended before it listened")
    return pid, int(port)


def waker() -> socket.socket:
    """A socket that becomes readable when a child ends or a handled signal arrives, for a select."""
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def ended(pid: int) -> int | None:
    """The exit code of a child, negative for the signal that killed it; None while it lives."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def kill(*pids: int) -> None:
    """End children at once, and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


# in-memory copies


def memory(scratch: Path) -> Path:
    """The folder in this host's memory (/dev/shm) that belongs to the scratch folder of a run."""
    return _everywhere() / f"dtrain-{os.getuid()}-{scratch.name}"


def remove(scratch: Path) -> None:
    """Remove the scratch folder of a run, and its folder in memory."""
    for folder in (scratch, memory(scratch)):
        shutil.rmtree(folder, ignore_errors=True)


def memories() -> Iterator[Path]:
    """The folders in memory of this user's runs; other users may have made some with such names."""
    return _everywhere().glob(f"dtrain-{os.getuid()}-*")


def _everywhere() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


CLAIMS = ("lock", "command")
"""The locks of a run's folders: of its processes, and of the command, which starts a killed server again."""


def claim(scratch: Path, by: str = "lock") -> int:
    """Make the run's folder in memory. The returned descriptor locks it for this process and all that it forks, until
    none of them is alive.
    """
    folder = memory(scratch)
    remove_stale(folder)
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed between two lines
            handle = os.open(folder / by, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(handle, fcntl.LOCK_SH)
            os.pwrite(handle, str(scratch).encode(), 0)
            if (folder / by).exists() and (folder / by).stat().st_ino == os.fstat(handle).st_ino:
                return handle
            os.close(handle)


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A private folder on the local disk, removed at the end of the context; or by a later run, once this process and
    all that it forked have been killed.
    """
    folder = store.scratch(prefix)
    handle = claim(folder, "command")
    try:
        yield folder
    finally:
        remove(folder)
        os.close(handle)


def remove_stale(ours: Path) -> None:
    """Remove the folders of other runs with no process alive: in memory, and their scratch folders."""
    for folder in memories():
        if folder == ours:
            continue
        with contextlib.suppress(OSError), _locked(folder) as scratch:
            if memory(scratch) == folder:
                shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)


def stale() -> list[Path]:
    """The folders in memory that `remove_stale` would remove."""
    folders = []
    for folder in memories():
        with contextlib.suppress(OSError), _locked(folder):
            folders.append(folder)
    return folders


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Lock a folder in memory, so that nobody can claim it; yields its scratch folder. Raises OSError if it is claimed,
    or belongs to another user.
    """
    with contextlib.ExitStack() as stack:
        locks = [folder / name for name in CLAIMS if (folder / name).exists()]
        if not locks or any(path.lstat().st_uid != os.getuid() for path in (folder, *locks)):
            raise FileNotFoundError(folder)
        files = [stack.enter_context(path.open("r+", encoding="utf-8")) for path in locks]
        for file in files:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(files[0].read())


def gone(folder: Path, seconds: float) -> bool:
    """Whether all processes that claimed the folder end within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with (folder / "lock").open("r+", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        except FileNotFoundError:
            return True
        except BlockingIOError:
            time.sleep(0.005)
    return False
