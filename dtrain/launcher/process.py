"""Processes of one run: each dies with the one that forked it, and all of them are seen to be gone by one lock that they share."""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain import secrets


def fork(work: Callable[[], Any], name: str = "") -> int:
    """A child that does `work` and ends, and that dies when this process does. Its pid. `name`, of 15 letters at most, is what `ps` and `top` show."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(parent)
        if name and sys.platform == "linux":
            ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME
        work()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        print(secrets.masked(traceback.format_exc()), end="", file=sys.stderr)
    finally:
        with contextlib.suppress(OSError, ValueError):  # nobody reads on
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def die_with(parent: int) -> None:
    """Linux: get SIGKILL when `parent`, which forked this process, ends in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)


def fork_keeper() -> tuple[int, int]:
    """A process that holds a rendezvous store: its pid, and the port it listens on. Raises ConnectionError when it died at once."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported without saying so

    reading, writing = os.pipe()

    def keep() -> None:
        os.close(reading)
        held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(held.port).encode())
        os.close(writing)
        while True:
            time.sleep(3600)

    pid = fork(keep, "dtrain-keeper")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        port = pipe.read()
    if not port:
        os.waitpid(pid, 0)
        raise ConnectionError("the keeper of the rendezvous store ended before it listened")
    return pid, int(port)


def waker() -> socket.socket:
    """A socket that becomes readable when a child ends or a handled signal arrives, so that a select over it misses none."""
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
    """The folder in this host's memory (where it has one) that belongs to the scratch folder of a run."""
    return _everywhere() / f"dtrain-{os.getuid()}-{scratch.name}"


def _everywhere() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def claim(scratch: Path) -> int:
    """Make the run's folder in memory. The descriptor returned locks it for this process and all it forks: it is free when none of them lives."""
    folder = memory(scratch)
    sweep(folder)
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # swept away between two lines
            handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(handle, fcntl.LOCK_SH)
            os.pwrite(handle, str(scratch).encode(), 0)
            if (folder / "lock").exists() and (folder / "lock").stat().st_ino == os.fstat(handle).st_ino:
                return handle
            os.close(handle)


def sweep(ours: Path) -> None:
    """Remove what other runs left that were killed whole: their folders in memory, and the scratch folders these belong to."""
    for lock in _everywhere().glob(f"dtrain-{os.getuid()}-*/lock"):
        if lock.parent == ours:
            continue
        with contextlib.suppress(OSError), lock.open("r+") as file:  # locked: its run lives
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.lstat().st_uid == lock.parent.lstat().st_uid == os.getuid():  # anybody may make folders there
                scratch = Path(file.read())
                if memory(scratch) == lock.parent:
                    shutil.rmtree(scratch, ignore_errors=True)
                shutil.rmtree(lock.parent, ignore_errors=True)


def abandoned() -> list[Path]:
    """Folders in memory of runs of this user that were killed whole, and that `sweep` would remove."""
    found = []
    for lock in _everywhere().glob(f"dtrain-{os.getuid()}-*/lock"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(lock.parent)
    return found


def gone(folder: Path, seconds: float) -> bool:
    """Whether, within `seconds`, no process lives any more that claimed the folder."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with (folder / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
        except FileNotFoundError:
            return True
        except BlockingIOError:
            time.sleep(0.005)
    return False
