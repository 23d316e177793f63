"""One writer per `out`: a run holds a lease with a number that only grows, and a run with an older number may not
commit any more.

    <out>/lease/00000003.json      owner, begin and last renewal of the lease; how it was released, if it was

A file is created only if its number does not exist yet, so if several runs start together, one wins and the others are
refused. A lease whose owner is gone is taken over: at once if the owner ran on this machine and its process has ended,
otherwise after watching its file for `STALE_SECONDS` without a change. Clocks of different machines are never compared.
"""

import contextlib
import getpass
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dtrain.config.environment import LEASE, LEASE_OWNER
from dtrain.config.structure import COUNT, TEXT, Kind, Optional, fault
from dtrain.errors import EXIT_CODES, LeaseError, StoreError
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.storage.attempts import highest_lease

CLOCK = Kind("a time", lambda value: type(value) in (int, float) and 0 <= value < 1e11)
FILE = re.compile(r"([0-9]{8}|[1-9][0-9]{8,14})\.json")
RENEW_SECONDS, STALE_SECONDS, LOOK_SECONDS = 10.0, 30.0, 1.0
LISTED_SECONDS = 60.0
"""How long a storage may take to list a file."""
END_SECONDS = 10.0
"""Time in which a run that lost its lease should end by itself."""

Record = Mapping[str, Any]
SHAPE = {
    "id": TEXT, "owner": TEXT, "pid": Kind("a process id", lambda value: type(value) is int and 0 < value < 1 << 31),
    "place": TEXT,
    "started": Optional(TEXT), "begun": CLOCK, "renewed": CLOCK, "state": TEXT, "exit_code?": COUNT,
}  # fmt: skip
GONE: Record = {"state": "released"}
"""In place of the record of a lease that is listed and no more there."""
TRIES = 20
"""How often another process may be quicker."""
_leases: dict[str, tuple[str, int, Record]] = {}
"""The leases of this process, by id: place, number and contents of the file."""


@contextlib.contextmanager
def hold(out: str, key: str = "out") -> Iterator[int]:
    """Be the only run that writes under `out`, which the user named by `key`. The number of the lease and its owner are
    also in the environment, for `verify` on the ranks.

    Raises LeaseError if another run holds it, and at the end if another run has taken over.
    """
    token, record = _claim(out, key)
    before = {name: os.environ.get(name) for name in (LEASE, LEASE_OWNER)}
    os.environ.update({LEASE: str(token), LEASE_OWNER: record["id"]})
    _leases[record["id"]] = (out, token, record)
    renewal, code = _Renewal(out, token, record), 0
    try:
        yield token
    except BaseException as error:
        code = getattr(error, "exit_code", EXIT_CODES["interrupted"] if isinstance(error, KeyboardInterrupt) else 1)
        raise
    finally:
        renewal.stop()
        del _leases[record["id"]]
        for name, value in before.items():
            os.environ.pop(name, None)  # user code may have cleared it
            if value is not None:
                os.environ[name] = value
        if renewal.lost:
            raise LeaseError(renewal.lost)
        _release(out, token, record, code)


def give_back(exit_code: int) -> None:
    """Release all leases of this process, which is about to end."""
    for out, token, record in list(_leases.values()):
        if record["pid"] == os.getpid():  # a fork has those of its parent
            _release(out, token, record, exit_code)


def _release(out: str, token: int, record: Record, exit_code: int) -> None:
    with contextlib.suppress(StoreError):  # a lease that is not released becomes stale
        if not _loss(out, token, record["id"]):
            _write(out, token, {**record, "renewed": time.time(), "state": "released", "exit_code": exit_code})


def verify(out: str) -> None:
    """Raises LeaseError if the newest lease of `out` belongs to another run: one with a higher number, or with any
    number if the lease folder was removed or other storage was mounted at `out`.

    Does nothing without a lease in the environment.
    """
    token, owner = int(os.environ.get(LEASE, "0")), os.environ.get(LEASE_OWNER)
    if token and (loss := _loss(out, token, owner)):
        raise LeaseError(loss)


def holder(out: str) -> tuple[Literal["free", "held", "left", "unknown"], str]:
    """The state of `out` and its writer, as far as one look shows: `left` by a process that has ended, `unknown` if it
    is on another host. Raises StoreError.
    """
    token, there = _newest(out)
    if not token or there.get("state") == "released":
        return "free", ""
    if _gone(there):
        return "left", _who(there)
    return "held" if there.get("place") == _place() != "" else "unknown", _who(there)


def exit_code(out: str) -> int | None:
    """The exit code of the process that released the newest lease of `out`, 0 if its file does not tell; None if nobody
    released it. Raises StoreError.
    """
    _, there = _newest(out)
    return there.get("exit_code", 0) if there.get("state") == "released" else None


class _Renewal:
    """Renews the lease in a thread; ends this run if another one has taken over."""

    def __init__(self, out: str, token: int, record: Record) -> None:
        self.lost: str | None = None
        self._out, self._token, self._record = out, token, record
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="dtrain-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(timeout=RENEW_SECONDS)  # a longer wait could only be for unreachable storage

    def _keep(self) -> None:
        warned = False
        while not self._over.wait(RENEW_SECONDS):
            try:
                if loss := _loss(self._out, self._token, self._record["id"]):
                    self._end(loss)
                    return
                _write(self._out, self._token, {**self._record, "renewed": time.time()})
                warned = False
            except StoreError as error:
                again = f"and is tried again every {RENEW_SECONDS:.0f} s"
                if not warned:
                    screen.complain(f"the lease cannot be renewed, {again}: {error}")
                warned = True

    def _end(self, sentence: str) -> None:
        """Interrupt this process as a user would with two Ctrl-C: the first asks it to end, the second ends it if it
        does not; `hold` gives the reason.
        """
        self.lost = sentence
        for seconds in (1.0, END_SECONDS):
            os.kill(os.getpid(), signal.SIGINT)
            if self._over.wait(seconds):
                return
        screen.complain(sentence)
        os._exit(LeaseError.exit_code)


def _claim(out: str, key: str) -> tuple[int, Record]:
    """Create a lease with a number above every earlier lease and above every attempt below `checkpoints/`, because
    attempts may have been copied there or the lease folder removed. Raises LeaseError if a running process holds the
    newest lease.
    """
    since, saved = time.monotonic(), highest_lease(out)
    seen: tuple[int, Record] = (0, {})
    tries = 0
    while True:
        token, there = _newest(out)
        stale = (token, there) == seen and time.monotonic() - since > STALE_SECONDS
        alive = (token == seen[0] and there != seen[1]) or there.get("place") == _place() != ""
        if not token or there.get("state") == "released" or stale or _gone(there):
            mine, number = _record(), max(token, saved) + 1
            if _create(out, number, mine):
                _await_listing(out, number, key)
                for old in _tokens(out):
                    if old <= token:
                        store.remove(_url(out, old))
                if token and there.get("state") != "released":
                    screen.complain(f"took over {out} from {_who(there)}: it ended without giving it back.")
                return number, mine
            tries += 1
            if tries > TRIES:
                raise LeaseError(
                    f"{key}={out}: no lease can be taken: {tries} times another process had it a moment before, or the "
                    f"storage does not give what it has. Look at {store.join(out, 'lease')}, or type {key}=<another "
                    "place>."
                )
            time.sleep(LOOK_SECONDS if tries > 1 else 0)
        elif alive:
            raise LeaseError(
                f"{key}={out} is being written by another run: {_who(there)}, last renewed "
                f"{_clock(there.get('renewed'))}. "
                f"Wait for it, stop it ({_how_to_stop(there)}), or type {key}=<another place>."
            )
        elif token != seen[0]:
            screen.complain(
                f"{out} is held by {_who(there)}; watching for {STALE_SECONDS:.0f} s whether it is renewed."
            )
            since, seen = time.monotonic(), (token, there)
        else:
            time.sleep(LOOK_SECONDS)


def _create(out: str, token: int, record: Record) -> bool:
    """Whether the lease is ours now. A number far below the newest may have been pruned, and so be free again; such a
    lease is removed.
    """
    try:
        store.publish(_url(out, token), _bytes(record))
    except StoreError as error:
        if error.kind == "exists":
            return False
        raise
    newest, there = _newest(out, token)
    if newest > token:
        store.remove(_url(out, token))
    return newest == token and there.get("id") == record["id"]  # without exclusive create, the last writer wins


def _await_listing(out: str, token: int, key: str) -> None:
    """Wait until our lease is listed, and so whatever earlier runs have written. Raises LeaseError if that takes too
    long.
    """
    begin, is_told = time.monotonic(), False
    while token not in _tokens(out):
        waited = time.monotonic() - begin
        if waited > LISTED_SECONDS:
            store.remove(_url(out, token))
            raise LeaseError(
                f"{key}={out}: its storage does not list a file that was written {waited:.0f} s ago, and checkpoints "
                f"are found by listing. Type {key}=<a place whose listings are current>."
            )
        if waited > LOOK_SECONDS and not is_told:
            is_told = True
            screen.complain(
                f"{out} is storage that lists files late; waiting for up to {LISTED_SECONDS:.0f} s, so that no "
                "checkpoint is overlooked.",
                begin="note: ",
            )
        time.sleep(LOOK_SECONDS / 4)


def _newest(out: str, known: int = 0) -> tuple[int, Record]:
    """The highest lease number and the record in its file, which is empty if the file is damaged; 0 if there is no
    lease. `known`: a number that exists. Other storage may list late, so files with the next numbers are looked for.
    """
    token = max(known, max(_tokens(out), default=0))
    there = _read(out, token) if token else None
    while not store.is_local(out) and (later := _read(out, token + 1)) is not None:
        token, there = token + 1, later
    if there is None and token and store.is_local(out):  # removed since the listing
        return _newest(out)
    return token, GONE if there is None and token else there or {}


def _read(out: str, token: int) -> Record | None:
    """The record of a lease, empty if it is damaged; None if there is none."""
    try:
        record = json.loads(store.read(_url(out, token)))
        return {} if fault(record, SHAPE) else record
    except (ValueError, RecursionError):
        return {}
    except StoreError as error:
        if error.kind != "missing":
            raise
        return None


def _tokens(out: str) -> list[int]:
    """The numbers of all leases; other files in the folder are ignored."""
    matches = (FILE.fullmatch(name) for name in store.children(store.join(out, "lease")))
    return [int(match[1]) for match in matches if match]


def _url(out: str, token: int) -> str:
    return store.join(out, "lease", f"{token:08d}.json")


def _write(out: str, token: int, record: Record) -> None:
    store.write(_url(out, token), _bytes(record))


def _bytes(record: Record) -> bytes:
    return json.dumps(record, indent=1).encode()


def _record() -> Record:
    """The record of this process as the holder of a lease from now on."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user id may have no name
        user = str(os.getuid())
    now, pid, owner = time.time(), os.getpid(), f"{user}@{socket.gethostname()}"
    process = {"owner": owner, "pid": pid, "place": _place(), "started": _started(pid)}
    return {"id": os.urandom(16).hex(), **process, "begun": now, "renewed": now, "state": "held"}


@cache
def _place() -> str:
    """Where a process id is valid: this boot of this machine, and this PID namespace. Empty if the system does not
    tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process began, in ticks since boot; empty if it has ended and is a zombie; None if we may not see it."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return "" if state in "ZX" else rest[18]


def _gone(record: Record) -> bool:
    """Whether the owner's process is known to have ended."""
    if not _place() or record.get("place") != _place():
        return False
    if record["pid"] == os.getpid() and record["started"] == _started(record["pid"]):
        return record["id"] not in _leases
    try:
        os.kill(record["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is alive, and belongs to another user
        pass
    started = _started(record["pid"])
    return started is not None and started != record["started"]


def _who(record: Record) -> str:
    owner, pid = record.get("owner", "an unknown run"), record.get("pid", "unknown")
    return f"{owner}, pid {pid}, since {_clock(record.get('begun'))}"


def _how_to_stop(record: Record) -> str:
    owner = str(record.get("owner", ""))
    here = record.get("place") == _place()
    pid = record.get("pid")
    if not isinstance(pid, int) or owner.startswith("-"):  # the file could contain anything
        return "end it where it runs"
    return f"kill {pid}" if here else f"ssh {screen.typed(owner)} kill {pid}"


def _loss(out: str, token: int, owner: str | None) -> str:
    """How lease `token` of `owner` was lost; empty if it is the newest of `out`, or if there is none at all."""
    newest, there = _newest(out)
    if newest in (0, token) and (newest == 0 or owner is None or there.get("id", owner) == owner):
        return ""
    event = f"out={out} was taken over by another run"
    if newest < token:
        event = f"other storage has come to the place of out={out}, with the lease of a run"
    return f"{event}: {_who(there)}. This run ends; what it did after its last checkpoint is not kept."


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time"
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
