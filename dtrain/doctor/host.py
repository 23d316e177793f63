"""Checks of the host: ports, name, clock, temporary files, and leftovers of earlier runs."""

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
from dtrain.lifecycle import unwatched
from dtrain.secrets import screen

UNSYNCHRONISED = 5
"""TIME_ERROR, what adjtimex returns: https://man7.org/linux/man-pages/man2/adjtimex.2.html"""
BUILT = 1_760_000_000
"""October 2025 in seconds since 1970: an earlier clock is wrong."""
FREE_BYTES = 1 << 30
SERVER = re.compile(r"-m\0dtrain\.launcher\.local\.server\0(\d+)")
"""Matches the command line of a launcher's server; the group is the pid of the process that started it."""
ZYGOTE = re.compile(rf"{zygote.NAME} (\d+) ")
"""The same for a zygote, which forks servers."""


def loopback(case: Case) -> Iterable[Finding]:
    """Whether a port of 127.0.0.1, at which the ranks of a host meet, can be opened and reached."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname(), timeout=5):
            yield Finding("ports", "ok", "a port of 127.0.0.1 can be opened and reached")
    except OSError as error:
        advice = "ip link set lo up, or allow it in the sandbox or firewall"
        yield Finding("ports", "stop", f"no port of 127.0.0.1 can be opened and reached: {error}", advice)


def door(case: Case) -> Iterable[Finding]:
    """Whether `launcher.address`, at which other nodes join, can be opened."""
    address = case.plan.launcher.get("address")
    if not address:
        return
    try:
        host, port = network.endpoint(network.listening(str(address)))
        network.listen(host, port).close()
        yield Finding("address", "ok", f"{address} can be opened for nodes of other hosts")
    except (OSError, ValueError) as error:
        advice = (
            "launcher.address=<an address of this host>:<a free port>, see ss -ltnp 'sport = "
            f":{str(address).rpartition(':')[2]}'"
        )
        yield Finding("address", "stop", f"{address} cannot be opened: {error}", advice)
        return
    if weakness := network.weakness(host, case.environ):
        advice = f"export {environment.SECRET}=$(python -c 'import secrets; print(secrets.token_hex(16))')"
        yield Finding("secret", "stop", weakness, advice)


def name(case: Case) -> Iterable[Finding]:
    """This host's name, and its interface to other hosts. Gloo defaults to the interface that the name resolves to."""
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
        configured="GLOO_SOCKET_IFNAME" in case.environ,
    )


def named(host: str, address: str, leads: str, *, alone: bool, known: set[str], configured: bool) -> Finding:
    """Judge a host's name by the address that it resolves to (empty: none). `known`: the addresses of this host."""
    if alone or configured or (address in known and not address.startswith("127.")):
        return Finding("name", "ok", f"{host} is {address or 'no name that resolves'}; {leads}")
    advice = "GLOO_SOCKET_IFNAME=<the interface of the other nodes> before the command"
    return Finding("name", "note", f"{host} resolves to {address or 'nothing'}; {leads}", advice)


def clock(case: Case) -> Iterable[Finding]:
    """Whether the kernel's clock is NTP-synchronised."""
    state, error_us = _adjusted()
    yield kept(state, error_us, time.time())


def kept(state: int | None, error_us: int, now: float) -> Finding:
    """Judge a clock by the state that adjtimex returns (None: unknown) and its maximum error in microseconds."""
    if now < BUILT:
        date = time.strftime("%Y-%m-%d", time.gmtime(now))
        text = f"its date is {date}: certificates and signatures of a storage will be refused"
        advice = "set it: timedatectl set-ntp true"
        return Finding("clock", "stop", text, advice)
    if state == UNSYNCHRONISED:
        text = "may not be NTP-synchronised; timestamps may disagree with storage and other hosts"
        advice = "timedatectl set-ntp true"
        return Finding("clock", "note", text, advice)
    if state is None:
        return Finding("clock", "ok", "the system does not say whether it is synchronised")
    return Finding("clock", "ok", f"NTP-synchronised within {error_us / 1e3:.0f} ms")


def scratch(case: Case) -> Iterable[Finding]:
    """The temporary folder, which holds the logs of processes."""
    folder = tempfile.gettempdir()
    place = os.statvfs(folder)
    yield room(folder, place.f_frsize * place.f_bavail, place.f_favail if place.f_files else None)


def room(folder: str, free: int, names: int | None) -> Finding:
    """Judge free bytes, and free inodes if the filesystem counts them."""
    text = f"{free / (1 << 30):.1f} GiB free in {folder}"
    advice = "TMPDIR=<another folder> before the command"
    if free < FREE_BYTES >> 4 or names == 0:
        return Finding("scratch", "stop", text + ", and no free inodes" * (names == 0), f"free some, or {advice}")
    if free < FREE_BYTES:
        return Finding("scratch", "note", text, advice)
    return Finding("scratch", "ok", text)


def left(case: Case) -> Iterable[Finding]:
    """Runs of this user on this host, and what killed runs left behind."""
    runs = {pid: has_command for pid in _mine() if (has_command := _has_command(pid)) is not None}
    orphans = [pid for pid, has_command in runs.items() if not has_command]
    if orphans:
        advice = f"kill {' '.join(map(str, orphans))}"
        yield Finding("left", "note", f"processes whose command has ended: {', '.join(map(str, orphans))}", advice)
    others = len(runs) - len(orphans)
    stale = process.stale()
    if stale:
        size = sum(file.stat().st_size for folder in stale for file in folder.rglob("*") if file.is_file())
        advice = f"any next run frees it, or rm -r {' '.join(screen.typed(str(folder)) for folder in stale)}"
        yield Finding("left", "note", f"{len(stale)} killed run(s) left {size >> 20} MiB in memory", advice)
    reports = sorted(unwatched.stale())
    if reports:
        advice = f"any next run removes them, or rm -r {' '.join(screen.typed(str(folder)) for folder in reports)}"
        yield Finding("left", "note", f"{len(reports)} killed run(s) left a folder of reports", advice)
    if not orphans and not stale and not reports:
        runs_now = f"{others} other run(s) of this user on this host" if others else "no leftovers of earlier runs"
        yield Finding("left", "ok", runs_now)


def _has_command(pid: int) -> bool | None:
    """Whether the command that started this zygote or server is alive; None for any other process."""
    line, parent = _read(f"/proc/{pid}/cmdline"), _parent(pid)
    match = ZYGOTE.match(line) or SERVER.search(line)
    if not match or line == _read(f"/proc/{parent}/cmdline"):  # a fork of it, such as an agent
        return None
    return parent == int(match[1])


def _outward() -> str:
    """The address of this host towards other hosts; empty if there is none. Sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # reserved by RFC 5737
            return str(probe.getsockname()[0])
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
    timex = ctypes.create_string_buffer(256)  # struct timex; modes = 0 changes nothing
    state = ctypes.CDLL(None).adjtimex(timex)
    return (None, 0) if state < 0 else (state, struct.unpack_from("l", timex, 24)[0])


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
        return Path(path).read_text("utf-8", errors="replace")
    except OSError:
        return ""
