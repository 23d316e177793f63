"""How this host stands among others, and what earlier runs left on it: ports, its name, its clock, processes, temporary
files.
"""

import ctypes
import os
import re
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from dtrain.cluster import network
from dtrain.config import environment
from dtrain.doctor import Case, Finding
from dtrain.launcher import process, zygote
from dtrain.secrets import screen

UNSYNCHRONISED = 5
"""TIME_ERROR, what adjtimex returns: https://man7.org/linux/man-pages/man2/adjtimex.2.html"""
BUILT = 1_760_000_000
"""Seconds since 1970 of October 2025: no clock that is right shows less."""
FREE_BYTES = 1 << 30
SERVER = re.compile(r"-m\0dtrain\.launcher\.local\.server\0(\d+)")
"""In the command line of a launcher's server: the process that started it."""
ZYGOTE = re.compile(rf"{zygote.NAME} (\d+) ")
"""In that of a process that forks servers: the same."""


def loopback(case: Case) -> Iterable[Finding]:
    """Ranks of a host meet at a port that the system picks."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname(), timeout=5):
            yield Finding("ports", "ok", "a port of 127.0.0.1 can be opened and reached")
    except OSError as error:
        yield Finding(
            "ports",
            "stop",
            f"no port of 127.0.0.1 can be opened and reached: {error}",
            "ip link set lo up, or allow it in the sandbox or firewall",
        )


def door(case: Case) -> Iterable[Finding]:
    """Where nodes of other hosts would join."""
    address = case.plan.launcher.get("address")
    if not address:
        return
    try:
        host, port = network.endpoint(str(address))
        network.listen(host, port).close()
        yield Finding("address", "ok", f"{address} can be opened for nodes of other hosts")
    except (OSError, ValueError) as error:
        yield Finding(
            "address",
            "stop",
            f"{address} cannot be opened: {error}",
            "launcher.address=<an address of this host>:<a free port>, see ss -ltnp 'sport = "
            f":{str(address).rpartition(':')[2]}'",
        )
        return
    if weakness := network.weakness(host, case.environ):
        yield Finding(
            "secret",
            "stop",
            weakness,
            f"export {environment.SECRET}=$(python -c 'import secrets; print(secrets.token_hex(16))')",
        )


def name(case: Case) -> Iterable[Finding]:
    """This host's name, and the interface that leads to others: gloo takes the one its name resolves to, unless it is
    told.
    """
    here = {address: each for each, address in network.interfaces().items()}
    host, outward = socket.gethostname(), _outward()
    leads = (
        f"others are reached by {here.get(outward, 'an unknown interface')} ({outward})"
        if outward
        else "no interface leads to other hosts"
    )
    yield named(
        host,
        _resolved(host),
        leads,
        alone=not case.plan.launcher.get("address"),
        known=set(here),
        told="GLOO_SOCKET_IFNAME" in case.environ,
    )


def named(host: str, address: str, leads: str, *, alone: bool, known: set[str], told: bool) -> Finding:
    """The verdict on a host's name and what it resolves to (nothing: empty), on a host with these addresses."""
    if alone or told or (address in known and not address.startswith("127.")):
        return Finding("name", "ok", f"{host} is {address or 'no name that resolves'}; {leads}")
    return Finding(
        "name",
        "note",
        f"{host} resolves to {address or 'nothing'}; {leads}",
        "GLOO_SOCKET_IFNAME=<the interface of the other nodes> before the command",
    )


def clock(case: Case) -> Iterable[Finding]:
    """Whether the kernel's clock is NTP-synchronised."""
    state, error_us = _adjusted()
    yield kept(state, error_us, time.time())


def kept(state: int | None, error_us: int, now: float) -> Finding:
    """The verdict on a clock in this state of adjtimex (None: it does not tell), with this largest error in
    microseconds.
    """
    if now < BUILT:
        said = time.strftime("%Y-%m-%d", time.gmtime(now))
        return Finding(
            "clock",
            "stop",
            f"it says {said}: certificates and signatures of a storage will be refused",
            "set it: timedatectl set-ntp true",
        )
    if state == UNSYNCHRONISED:
        return Finding(
            "clock",
            "note",
            "may not be NTP-synchronised; timestamps may disagree with storage and other hosts",
            "timedatectl set-ntp true",
        )
    return Finding(
        "clock",
        "ok",
        "the system does not say whether it is synchronised"
        if state is None
        else f"NTP-synchronised within {error_us / 1e3:.0f} ms",
    )


def scratch(case: Case) -> Iterable[Finding]:
    """The folder in which a run keeps what its processes say."""
    folder = tempfile.gettempdir()
    place = os.statvfs(folder)
    yield room(folder, place.f_frsize * place.f_bavail, place.f_favail if place.f_files else None)


def room(folder: str, free: int, names: int | None) -> Finding:
    """The verdict on free bytes, and free names (inodes) where the filesystem counts them."""
    text = f"{free / (1 << 30):.1f} GiB free in {folder}"
    if free < FREE_BYTES >> 4 or names == 0:
        return Finding(
            "scratch",
            "stop",
            text + ", and no name for a new file" * (names == 0),
            "free some, or TMPDIR=<another folder> before the command",
        )
    return Finding(
        "scratch",
        "note" if free < FREE_BYTES else "ok",
        text,
        "TMPDIR=<another folder> before the command" if free < FREE_BYTES else "",
    )


def left(case: Case) -> Iterable[Finding]:
    """Runs of this user that are going on here, and what is left of those that were killed."""
    runs = {pid: has_command for pid in _mine() if (has_command := _has_command(pid)) is not None}
    orphans = [pid for pid, has_command in runs.items() if not has_command]
    if orphans:
        yield Finding(
            "left",
            "note",
            f"processes whose command is gone: {', '.join(map(str, orphans))}",
            f"kill {' '.join(map(str, orphans))}",
        )
    others = len(runs) - len(orphans)
    stale = process.stale()
    if stale:
        size = sum(file.stat().st_size for folder in stale for file in folder.rglob("*") if file.is_file())
        yield Finding(
            "left",
            "note",
            f"{len(stale)} killed run(s) left {size >> 20} MiB in memory",
            f"any next run frees it, or rm -r {' '.join(screen.typed(str(folder)) for folder in stale)}",
        )
    if not orphans and not stale:
        yield Finding(
            "left",
            "ok",
            f"{others} other run(s) of this user are going on here" if others else "nothing of earlier runs",
        )


def _has_command(pid: int) -> bool | None:
    """Whether the command of a run lives, seen from its zygote, or its server where that is a new interpreter; None for
    any other process.
    """
    line, parent = _read(f"/proc/{pid}/cmdline"), _parent(pid)
    parents_line = _read(f"/proc/{parent}/cmdline")
    if forks := ZYGOTE.match(line):
        return parent == int(forks[1])
    server = SERVER.search(line)
    if not server or SERVER.search(parents_line):  # agents and ranks are forked from the server
        return None
    return parent == int(server[1])


def _outward() -> str:
    """The address of this host from which others are reached: nothing is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # of no host: RFC 5737
            return str(asking.getsockname()[0])
        except OSError:
            return ""


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _adjusted() -> tuple[int | None, int]:
    if sys.platform != "linux":
        return None, 0
    told = ctypes.create_string_buffer(256)  # struct timex, with modes = 0: ask, and change nothing
    state = ctypes.CDLL(None).adjtimex(told)
    return (None, 0) if state < 0 else (state, struct.unpack_from("l", told, 24)[0])


def _mine() -> list[int]:
    """Processes of this user."""
    return [
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if _owner(path) == os.getuid() and int(path.name) != os.getpid()
    ]


def _owner(path: Path) -> int:
    try:
        return path.stat().st_uid
    except OSError:
        return -1


def _parent(pid: int) -> int:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
