"""HTTP to servers: each address is checked when it is connected to, on every redirect, regardless of what its name
resolved to before.

    dtrain plan recipe=https://host/a.yaml      # neither a redirect nor a name in it leads to 169.254.169.254

A URL that the user typed may name any server; but a public server cannot redirect into the local network, and neither
can a server that a recipe from elsewhere or a row of a table named.
"""

import errno
import ipaddress
import socket
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

REACHABLE = ("http", "https", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf")
"""Schemes that a remote recipe, and the rows of a table elsewhere, may name: none of them opens files of this machine,
or sends its credentials to another machine.
"""
SILENCE_SECONDS = 60.0
"""A web server that sends no data for this long is given up; a large file may take any time in total."""
INSIDE = "it leads to this machine or its network, which no public server and no recipe from elsewhere may do"
WHOLE = 64 << 20
"""Bytes of the largest file that is read whole where its server gives no parts."""
NO_PARTS = "its server gives no parts of a file (it ignores byte ranges), and this one is read in parts"
Judge = Callable[[Any], socket.socket]
"""Takes an entry of getaddrinfo, returns the socket to connect with. Raises NotPublicError."""
_named: set[tuple[str, int]] = set()
"""Private addresses of servers whose recipe the user named: such a recipe may read from them."""


class NotPublicError(PermissionError):
    pass


def client(judge: Judge | None = None) -> Callable[..., Any]:
    """A factory of fsspec's HTTP sessions."""
    return partial(_session, judge)


async def _session(judge: Judge | None, **options: Any) -> Any:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE_SECONDS)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=judge), timeout=timeout, **options)


def in_parts(fs: Any) -> Callable[..., Any]:
    """The `_cat_file` of an HTTP filesystem of fsspec, which takes whatever is sent for the part that was asked for. A
    server that ignores ranges sends the whole file: the part is cut out of it, and the newest such file is kept. Raises
    ValueError if it has more than WHOLE bytes.
    """
    plain, kept = fs._cat_file, dict[str, bytes]()

    async def cat(url: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if (start is None and end is None) or start == end:
            return bytes(await plain(url, start, end, **options))
        if url in kept:
            return kept[url][start:end]
        session, asked = await fs.set_session(), {**fs.kwargs, **options}
        headers = {**asked.pop("headers", {}), "Range": await fs._process_limits(url, start, end)}
        async with session.get(fs.encode_url(url), headers=headers, **asked) as answer:
            fs._raise_not_found_for_status(answer, url)
            if answer.status != 200 or "Content-Range" in answer.headers:
                return bytes(await answer.read())
            data = bytearray()
            async for part in answer.content.iter_any():
                data += part
                if len(data) > WHOLE:
                    raise ValueError(NO_PARTS)
        kept.clear()
        kept[url] = bytes(data)
        return kept[url][start:end]

    return cat


def to_public(entry: Any) -> socket.socket:
    """The judge for URLs named by a recipe from elsewhere or by a row: public addresses only."""
    family, kind, protocol, _, (host, port, *_) = entry
    if not is_public(_address(host)) and (host, port) not in _named:
        raise NotPublicError(errno.EACCES, INSIDE)
    return socket.socket(family, kind, protocol)


def from_a_person() -> Judge:
    """The judge for a recipe URL that the user typed: it may be a private server, but a public server cannot redirect
    to a private one.
    """
    first = list[bool]()

    def judge(entry: Any) -> socket.socket:
        host, port, *_ = entry[4]
        first.append(is_public(_address(host)))
        if not first[0]:
            _named.add((host, port))
        return to_public(entry)

    return judge


def from_server(name: str) -> Judge:
    """The judge for any other URL of the server with this name: a private server leads anywhere, a public one to its
    own addresses and to public ones.
    """
    first = list[bool]()

    def judge(entry: Any) -> socket.socket:
        family, kind, protocol, _, (host, *_) = entry
        address = _address(host)
        if not first:
            first.append(is_public(address))
        may_refuse = first[0] and not is_public(address) and address not in _addresses(name)
        return to_public(entry) if may_refuse else socket.socket(family, kind, protocol)

    return judge


def hand_over() -> list[tuple[str, int]]:
    """State for a child process."""
    return sorted(_named)


def take_over(state: Sequence[Sequence[Any]]) -> None:
    """Restore the state of the parent's `hand_over`."""
    _named.update((str(host), int(port)) for host, port in state)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(host.split("%")[0])


def _addresses(name: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Addresses of a name; empty if it does not resolve."""
    try:
        return {_address(str(entry[4][0])) for entry in socket.getaddrinfo(name, None)}
    except (OSError, ValueError):
        return set()


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is outside this machine and outside private networks; an embedded IPv4 address is checked
    too.
    """
    inner = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    if isinstance(address, ipaddress.IPv6Address) and address in ipaddress.ip_network("64:ff9b::/96"):
        inner = ipaddress.ip_address(int(address) & 0xFFFFFFFF)
    return is_public(inner) if inner else address.is_global and not address.is_multicast


@cache
def is_inside(host: str) -> bool:
    """Whether a host is this machine or in a private network, by its address or, of a name that resolves, by all of its
    addresses.
    """
    found = _addresses(host or "localhost")
    return not all(map(is_public, found)) if found else "." not in host
