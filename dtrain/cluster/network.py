"""Addresses and interfaces of this host, and the secret shared by the hosts of a run. Without torch."""

import contextlib
import ipaddress
import os
import random
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dtrain.config.environment import SECRET
from dtrain.errors import why

SHORTEST = 16
HOW = (
    "Make one with python -c 'import secrets; print(secrets.token_hex(16))' and set it in the environment of the "
    "command and of every agent."
)


PORTS = range(20000, 32000)
"""Below the ephemeral ports, which any connection may take."""


def endpoint(address: str) -> tuple[str, int]:
    """Host and port of <host>:<port>. Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(f"{address} is not <host>:<port>")
    if _is_every(host):
        raise ValueError(f"{address} means all interfaces of this host; other hosts need the address of one")
    return host, int(port)


def meeting(address: str | None) -> str:
    """<host>:<port> where a run can be served. A missing port, or 0, is one that is free now; without an address, the
    host is that of `outward`. Raises ValueError for no address, and OSError if it cannot be listened at.
    """
    host, port = endpoint(listening(address or outward()))
    if not port:
        for port in random.sample(PORTS, 100):
            with contextlib.suppress(OSError), listen(host, port):
                break
        else:
            listen(host, 0).close()  # the reason, if it is the host
            raise OSError(f"no port of {PORTS.start} to {PORTS.stop - 1} is free")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening(address: str) -> str:
    """`address` with port 0, any that is free, if it has none."""
    return address if ":" in address and not address.endswith("]") else f"{address}:0"


def outward(towards: str = "192.0.2.1") -> str:
    """The IPv4 address of this host on its way to `towards`, by default to other networks. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
            return str(probe.getsockname()[0])
        except OSError:  # no network: the nodes are processes of this host
            return "127.0.0.1"


def _is_every(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether a name or an address is on loopback."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # unknown, or not a valid name
        return False
    return all(ipaddress.ip_address(str(answer[4][0]).partition("%")[0]).is_loopback for answer in answers)


def is_only_here(host: str) -> bool:
    """Whether `host` is localhost or a loopback address, which other hosts cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def absence(host: str) -> str:
    """Why this host cannot listen at `host`; empty if it can."""
    try:
        listen(host, 0).close()
    except (OSError, UnicodeError) as error:
        reason = why(error) if isinstance(error, OSError) else "no valid name"
        return f"this host has no such address ({reason}). Type one that the nodes reach: hostname -I shows them."
    return ""


def weakness(host: str, environ: Mapping[str, str], *, is_made: bool = False) -> str:
    """Why serving or joining a run at `host` is not safe; empty on loopback or with a secret that is long enough.
    `is_made`: a secret is made if there is none.
    """
    secret = environ.get(SECRET, "")
    if secret and len(secret) < SHORTEST:
        return f"{SECRET} has {len(secret)} characters and can be guessed: use {SHORTEST} or more. {HOW}"
    if not secret and not is_made and not is_loopback(host):
        return f"{host} is reachable from other hosts, but {SECRET} is not set. {HOW}"
    return ""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens only on this address of the host. Raises OSError."""
    family, _, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(name[:2], family=family)


# interfaces


def interfaces() -> dict[str, str]:
    """The interfaces of this host -> their IPv4 addresses; empty unless this is Linux."""
    addresses = {}
    if sys.platform == "linux":
        import fcntl
        import struct

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def sockets(address: str) -> dict[str, str]:
    """Variables that make gloo (on loopback NCCL too) listen only on the interface with this address. Empty if no
    interface has it: they then use the one that the host's name resolves to.
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
    """Make gloo and NCCL listen only on loopback, unless the environment sets an interface."""
    added = {name: value for name, value in sockets("127.0.0.1").items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
