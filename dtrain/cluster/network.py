"""Addresses and interfaces of this host, and the secret shared by the hosts of a run. Without torch."""

import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dtrain.config.environment import SECRET

SHORTEST = 16
HOW = (
    "Make one with python -c 'import secrets; print(secrets.token_hex(16))' and set it in the environment of the "
    "command and of every agent."
)


def endpoint(address: str) -> tuple[str, int]:
    """Host and port of <host>:<port>. Raises ValueError with a sentence."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(f"{address} is no <host>:<port>")
    if _is_every(host):
        raise ValueError(f"{address} means every interface of this host, not one that others can be told")
    return host, int(port)


def _is_every(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of loopback."""
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # nobody knows it, or it can be no name
        return False
    return all(ipaddress.ip_address(address).is_loopback for address in found)


def is_only_here(host: str) -> bool:
    """Whether `host` means the reader's own host, on every host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def weakness(host: str, environ: Mapping[str, str]) -> str:
    """Why a run may neither be served nor joined at `host`; empty for loopback, and for any other if the secret is set
    and long enough.
    """
    secret = environ.get(SECRET, "")
    if secret and len(secret) < SHORTEST:
        return f"{SECRET} has {len(secret)} characters and can be guessed: {SHORTEST} at least. {HOW}"
    if not secret and not is_loopback(host):
        return f"{host} is reached from other hosts, and {SECRET} is not set. {HOW}"
    return ""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at this address of the host alone. Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(place[:2], family=family)


# interfaces


def interfaces() -> dict[str, str]:
    """Interface -> its IPv4 address, on this host; None if this is not Linux."""
    found = {}
    if sys.platform == "linux":
        import fcntl
        import struct

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def sockets(address: str) -> dict[str, str]:
    """The variables that make gloo, and on loopback NCCL too, listen at the interface with this address alone. None if
    no interface has it: then they use the one that the host's name resolves to.
    """
    alone = ipaddress.ip_address(address).is_loopback
    here = (
        name
        for name, its in interfaces().items()
        if its == address or (alone and ipaddress.ip_address(its).is_loopback)
    )
    name = next(here, None)
    if name is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": name} | ({"NCCL_SOCKET_IFNAME": f"={name}"} if alone else {})


def take_interface(address: str) -> None:
    """Set `sockets` for this process and its children, unless the environment sets them."""
    for name, value in sockets(address).items():
        os.environ.setdefault(name, value)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Make gloo and NCCL listen on loopback alone, unless the environment says otherwise."""
    told = {name: value for name, value in sockets("127.0.0.1").items() if name not in os.environ}
    os.environ.update(told)
    try:
        yield
    finally:
        for name in told:
            os.environ.pop(name, None)
