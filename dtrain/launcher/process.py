"""Processes of one run: each dies with the one that forked it, and all of them are seen to be gone by one lock that
they share.
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
from dtrain.secrets import screen

KEEPER_SECONDS = 10.0
"""A store that listens by then never will."""


def fork(work: Callable[[], Any], name: str = "") -> int:
    """A child that does `work` and ends, and that dies when this process does. Its pid. `name`, of 15 letters at most,
    is what `ps` and `top` show.
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


def die_with(parent: int) -> None:
    """Linux: get SIGKILL when `parent`, which forked this process, ends in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)


def is_gone(pid: int, seconds: float) -> bool:
    """Whether any process, whoever started it, has ended by then."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # not Linux, or one before 5.3
        time.sleep(seconds)
        return not _answers(pid)
    try:
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        return bool(ended.poll(seconds * 1000))
    finally:
        os.close(handle)


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, and belongs to another user
        pass
    return True


def parent_of(pid: int) -> int:
    """0 when there is no such process."""
    return int(_stat(pid, 1) or 0)


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped, by SIGSTOP or a debugger."""
    return _stat(pid, 0) in ("T", "t")


def _stat(pid: int, field: int) -> str:
    """A field of /proc/<pid>/stat behind the name; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[field]
    except OSError:
        return ""


def fork_store(address: str = "127.0.0.1") -> tuple[int, int]:
    """A process that holds a rendezvous store: its pid, and the port of `address`, and of no other, that it listens on.

    Raises ConnectionError when it died at once.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported without saying so

    reading, writing = os.pipe()

    def keep() -> None:
        os.close(reading)
        end = network.listen(address, 0)
        port = end.getsockname()[1]
        held = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=end.detach())
        os.write(writing, str(held.port).encode())
        os.close(writing)
        while True:
            time.sleep(3600)

    pid = fork(keep, "dtrain-store")
    os.close(writing)
    with os.fdopen(reading) as pipe:
        port = pipe.read() if select.select([pipe], [], [], KEEPER_SECONDS)[0] else ""
    if not port:
        kill(pid)
        raise ConnectionError("the store process ended before it listened")
    return pid, int(port)


def waker() -> socket.socket:
    """A socket that becomes readable when a child ends or a handled signal arrives, so that a select over it misses
    none.
    """
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


def memories() -> Iterator[Path]:
    """Those of all runs of this user, and whatever others gave such a name."""
    return _everywhere().glob(f"dtrain-{os.getuid()}-*")


def _everywhere() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


CLAIMS = ("lock", "command")
"""Who needs a run's folders: the processes that work there, and the command, which starts the server again when it was
killed.
"""


def claim(scratch: Path, by: str = "lock") -> int:
    """Make the run's folder in memory. The descriptor returned locks it for this process and all it forks: it is free
    when none of them lives.
    """
    folder = memory(scratch)
    sweep(folder)
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # swept away between two lines
            handle = os.open(folder / by, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(handle, fcntl.LOCK_SH)
            os.pwrite(handle, str(scratch).encode(), 0)
            if (folder / by).exists() and (folder / by).stat().st_ino == os.fstat(handle).st_ino:
                return handle
            os.close(handle)


def sweep(ours: Path) -> None:
    """Remove what other runs left that were killed whole: their folders in memory, and the scratch folders these belong
    to.
    """
    for folder in memories():
        if folder == ours:
            continue
        with contextlib.suppress(OSError), _abandoned(folder) as scratch:
            if memory(scratch) == folder:
                shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)


def abandoned() -> list[Path]:
    """Folders in memory of runs of this user that were killed whole, and that `sweep` would remove."""
    found = []
    for folder in memories():
        with contextlib.suppress(OSError), _abandoned(folder):
            found.append(folder)
    return found


@contextlib.contextmanager
def _abandoned(folder: Path) -> Iterator[Path]:
    """The scratch folder that this one in memory belongs to; inside nobody can claim it. Raises OSError where somebody
    has, or it is not ours.
    """
    with contextlib.ExitStack() as stack:
        locks = [folder / name for name in CLAIMS if (folder / name).exists()]
        if not locks or any(
            path.lstat().st_uid != os.getuid() for path in (folder, *locks)
        ):  # anybody may make folders there
            raise FileNotFoundError(folder)
        files = [stack.enter_context(path.open("r+")) for path in locks]
        for file in files:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(files[0].read())


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
