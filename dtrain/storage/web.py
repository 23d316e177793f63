"""HTTP where a stranger chose the server: an address is judged when it is connected to, in every redirect, whatever its
name resolved to before.

    dtrain plan recipe=https://host/a.yaml      # neither a redirect nor a name in it leads to 169.254.169.254

What a person types goes where it likes; a public server from which a recipe is read sends nobody inside.
"""

import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

SILENCE_SECONDS = 60.0
"""A server of the web that sends nothing for so long is left; a large file may take as long as it takes."""
INSIDE = "it leads to this machine or its network, which a recipe from elsewhere may not"
Judge = Callable[[Any], socket.socket]
"""An entry of getaddrinfo -> the socket to connect with. Raises NotPublicError."""
_named: set[tuple[str, int]] = set()
"""Addresses that are not public, where a recipe lies that a person named: it may open what is there."""


class NotPublicError(PermissionError):
    pass


def client(judge: Judge | None = None) -> Callable[..., Any]:
    """Factory of fsspec's HTTP session."""
    return partial(_session, judge)


async def _session(judge: Judge | None, **options: Any) -> Any:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE_SECONDS)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=judge), timeout=timeout, **options)


def to_public(entry: Any) -> socket.socket:
    """For what a recipe from elsewhere names."""
    family, kind, protocol, _, (host, port, *_) = entry
    if not is_public(_address(host)) and (host, port) not in _named:
        raise NotPublicError(errno.EACCES, INSIDE)
    return socket.socket(family, kind, protocol)


def from_a_person() -> Judge:
    """For a recipe that a person named: they may mean a server inside, and one outside sends them nowhere inside."""
    first = list[bool]()

    def judge(entry: Any) -> socket.socket:
        host, port, *_ = entry[4]
        first.append(is_public(_address(host)))
        if not first[0]:
            _named.add((host, port))
        return to_public(entry)

    return judge


def hand_over() -> list[tuple[str, int]]:
    """State to hand to a child process."""
    return sorted(_named)


def take_over(told: Sequence[Sequence[Any]]) -> None:
    """Take over the result of the parent's `hand_over`."""
    _named.update((str(host), int(port)) for host, port in told)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host.split("%")[0])


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is neither of this machine nor of a network that is not everybody's, an IPv4 address inside of
    it included.
    """
    inner = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    if isinstance(address, ipaddress.IPv6Address) and address in ipaddress.ip_network("64:ff9b::/96"):
        inner = ipaddress.ip_address(int(address) & 0xFFFFFFFF)
    return is_public(inner) if inner else address.is_global and not address.is_multicast
