"""One writer per `out`: a run holds a lease with a number that only grows, and whoever has an older number may commit
no more.

    <out>/lease/00000003.json      who holds it, since when, when it was last renewed, whether it was given back

A file is created only if its number is not there yet, so of any number of runs that start together one wins; the others
are refused. A lease whose owner is gone is taken over: at once where the owner's process can be looked for (this
machine), else when its file has not changed for `STALE_SECONDS` while we watched. No two clocks are compared.
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
import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dtrain.config.environment import LEASE, LEASE_OWNER
from dtrain.config.structure import TEXT, Kind, Optional, fault
from dtrain.errors import LeaseError, StoreError
from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.storage.attempts import highest_lease

CLOCK = Kind("a time", lambda value: type(value) in (int, float) and 0 <= value < 1e11)
FILE = re.compile(r"([0-9]{8}|[1-9][0-9]{8,14})\.json")
RENEW_SECONDS, STALE_SECONDS, LOOK_SECONDS = 10.0, 30.0, 1.0
END_SECONDS = 10.0
"""A run that lost its lease gets this long to end by itself."""

Record = Mapping[str, Any]
SHAPE = {
    "id": TEXT, "owner": TEXT, "pid": Kind("a process id", lambda value: type(value) is int and 0 < value < 1 << 31),
    "place": TEXT,
    "started": Optional(TEXT), "begun": CLOCK, "renewed": CLOCK, "state": TEXT,
}  # fmt: skip
_held: dict[str, tuple[str, int, Record]] = {}
"""The lease of this process, by its id: place, number and contents of the file."""


@contextlib.contextmanager
def hold(out: str) -> Iterator[int]:
    """Be the one run that writes under `out`; the number of the lease and its owner are also in the environment, for
    `verify` on the ranks.

    Raises LeaseError when another run holds it, and at the end when another run has taken over.
    """
    token, record = _claim(out)
    before = {name: os.environ.get(name) for name in (LEASE, LEASE_OWNER)}
    os.environ.update({LEASE: str(token), LEASE_OWNER: record["id"]})
    _held[record["id"]] = (out, token, record)
    renewal = _Renewal(out, token, record)
    try:
        yield token
    finally:
        renewal.stop()
        del _held[record["id"]]
        for name, value in before.items():
            os.environ.pop(name, None)  # code of the user's own may have cleared it
            if value is not None:
                os.environ[name] = value
        if renewal.lost:
            raise LeaseError(renewal.lost)
        _release(out, token, record)


def give_back() -> None:
    """All that this process holds, because it is about to end."""
    for out, token, record in list(_held.values()):
        _release(out, token, record)


def _release(out: str, token: int, record: Record) -> None:
    with contextlib.suppress(StoreError):  # what is not given back goes stale
        newest, there = _newest(out)
        if _is_others(newest, there, token, record["id"]):
            return
        _write(out, token, {**record, "renewed": time.time(), "state": "released"})


def verify(out: str) -> None:
    """Raises LeaseError when the newest lease of `out` is of another run: a newer one, or one of any number where
    somebody removed the folder of leases, or where other storage has come to the place of `out`.

    Without a lease in the environment nothing is asked.
    """
    token, owner = int(os.environ.get(LEASE, "0")), os.environ.get(LEASE_OWNER)
    if token:
        newest, there = _newest(out)
        if _is_others(newest, there, token, owner):
            raise LeaseError(_lost(out, newest, there, token))


def holder(out: str) -> tuple[Literal["free", "held", "left", "unknown"], str]:
    """Who writes under `out`, as far as it can be seen at once: `left` by a process that is gone, `unknown` when it is
    of another host. Raises StoreError.
    """
    token, there = _newest(out)
    if not token or there.get("state") == "released":
        return "free", ""
    state: Literal["held", "left", "unknown"] = "held" if there.get("place") == _place() != "" else "unknown"
    if _gone(there):
        state = "left"
    return state, _who(there)


class _Renewal:
    """Renews the lease beside the run; when another run has taken over, ends this one."""

    def __init__(self, out: str, token: int, record: Record) -> None:
        self.lost: str | None = None
        self._out, self._token, self._record = out, token, record
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="dtrain-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(timeout=RENEW_SECONDS)  # longer it waits only for storage that is away

    def _keep(self) -> None:
        warned = False
        while not self._over.wait(RENEW_SECONDS):
            try:
                token, newest = _newest(self._out)
                if _is_others(token, newest, self._token, self._record["id"]):
                    self._end(_lost(self._out, token, newest, self._token))
                    return
                _write(self._out, self._token, {**self._record, "renewed": time.time()})
                warned = False
            except StoreError as error:
                if not warned:
                    screen.complain(
                        f"the lease cannot be renewed, and is tried again every {RENEW_SECONDS:.0f} s: {error}"
                    )
                warned = True

    def _end(self, sentence: str) -> None:
        """As two signals from the user would: the first is a request, the second ends what did not follow; `hold` says
        why.
        """
        self.lost = sentence
        for seconds in (1.0, END_SECONDS):
            os.kill(os.getpid(), signal.SIGINT)
            if self._over.wait(seconds):
                return
        screen.complain(sentence)
        os._exit(LeaseError.exit_code)


def _claim(out: str) -> tuple[int, Record]:
    """A lease of our own, with a number above all before it and above all that `checkpoints/` shows: those may have
    been copied there, or the folder of the leases removed. Raises LeaseError when a living run holds the newest.
    """
    since, saved = time.monotonic(), highest_lease(out)
    seen: tuple[int, Record] = (0, {})
    while True:
        token, there = _newest(out)
        stale = (token, there) == seen and time.monotonic() - since > STALE_SECONDS
        alive = (token == seen[0] and there != seen[1]) or there.get("place") == _place() != ""
        if not token or there.get("state") == "released" or stale or _gone(there):
            mine, number = _record(), max(token, saved) + 1
            if _create(out, number, mine):
                for old in _tokens(out):
                    if old <= token:
                        store.remove(_url(out, old))
                if token and there.get("state") != "released":
                    screen.complain(f"took over {out} from {_who(there)}: it ended without giving it back.")
                return number, mine
        elif alive:
            raise LeaseError(
                f"out={out} is being written by another run: {_who(there)}, last renewed "
                f"{_clock(there.get('renewed'))}. "
                f"Wait for it, stop it ({_how_to_stop(there)}), or type out=<another place>."
            )
        elif token != seen[0]:
            screen.complain(
                f"{out} is held by {_who(there)}; watching for {STALE_SECONDS:.0f} s whether it is renewed."
            )
            since, seen = time.monotonic(), (token, there)
        else:
            time.sleep(LOOK_SECONDS)


def _create(out: str, token: int, record: Record) -> bool:
    """Whether the lease is ours now. A number that was used and pruned long ago is free again, and worth nothing."""
    try:
        store.publish(_url(out, token), _bytes(record))
    except StoreError as error:
        if error.kind == "exists":
            return False
        raise
    newest, there = _newest(out)
    if newest > token:
        store.remove(_url(out, token))
    return (
        newest == token and there.get("id") == record["id"]
    )  # storage whose create is not exclusive let two in: the last one stays


def _newest(out: str) -> tuple[int, Record]:
    """The highest number and what its file says: nothing when it is torn; 0 when there is none."""
    token = max(_tokens(out), default=0)
    if not token:
        return 0, {}
    try:
        found = json.loads(store.read(_url(out, token)))
        return token, {} if fault(found, SHAPE) else found
    except (ValueError, RecursionError):
        return token, {}
    except StoreError as error:
        if error.kind == "missing":  # pruned since it was listed
            return _newest(out)
        raise


def _tokens(out: str) -> list[int]:
    """The numbers of the leases; a file that was named by somebody else is none."""
    matches = (FILE.fullmatch(name) for name in store.children(store.join(out, "lease")))
    return [int(match[1]) for match in matches if match]


def _url(out: str, token: int) -> str:
    return store.join(out, "lease", f"{token:08d}.json")


def _write(out: str, token: int, record: Record) -> None:
    store.write(_url(out, token), _bytes(record))


def _bytes(record: Record) -> bytes:
    return json.dumps(record, indent=1).encode()


def _record() -> Record:
    """This process, as one that holds a lease from now on."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = str(os.getuid())
    now, pid = time.time(), os.getpid()
    said = {
        "owner": f"{user}@{socket.gethostname()}",
        "pid": pid,
        "place": _place(),
        "started": _started(pid),
        "begun": now,
        "renewed": now,
    }
    return {"id": uuid.uuid4().hex, **said, "state": "held"}


@cache
def _place() -> str:
    """Where a process id means something: this boot of this machine, and this namespace. Empty where the system does
    not tell.
    """
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process began, in ticks since boot; empty when it has ended and only waits to be collected; None when we
    may not see it.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return "" if state in "ZX" else rest[18]


def _gone(record: Record) -> bool:
    """Whether the owner's process is known to be no more."""
    if not _place() or record.get("place") != _place():
        return False
    if record["pid"] == os.getpid() and record["started"] == _started(record["pid"]):
        return record["id"] not in _held
    try:
        os.kill(record["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it lives, and belongs to another user
        pass
    started = _started(record["pid"])
    return started is not None and started != record["started"]


def _who(record: Record) -> str:
    return (
        f"{record.get('owner', 'an unknown run')}, pid {record.get('pid', 'unknown')}, since "
        f"{_clock(record.get('begun'))}"
    )


def _how_to_stop(record: Record) -> str:
    owner = str(record.get("owner", ""))
    here = record.get("place") == _place()
    pid = record.get("pid")
    if not isinstance(pid, int) or owner.startswith("-"):  # anybody who may write there may say anything
        return "end it where it runs"
    return f"kill {pid}" if here else f"ssh {screen.typed(owner)} kill {pid}"


def _is_others(newest: int, there: Record, token: int, owner: str | None) -> bool:
    """Whether the newest lease that is there is none of `owner`'s with the number `token`; where there is none at all,
    it is nobody's.
    """
    return newest not in (0, token) or (newest == token and owner is not None and there.get("id", owner) != owner)


def _lost(out: str, newest: int, there: Record, token: int) -> str:
    taken = (
        f"out={out} was taken over by another run"
        if newest >= token
        else f"other storage has come to the place of out={out}, with the lease of a run"
    )
    return f"{taken}: {_who(there)}. This run ends; what it did after its last checkpoint is not kept."


def _clock(seconds: float | None) -> str:
    return (
        "an unknown time"
        if seconds is None
        else datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    )
