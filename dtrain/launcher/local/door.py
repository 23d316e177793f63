"""The socket where nodes of other hosts join a run. A peer that does not prove in time that it knows the run's secret
is disconnected, and the run goes on.
"""

import contextlib
import os
import secrets
import selectors
import socket
import time
from pathlib import Path

from dtrain.cluster import network
from dtrain.config import environment
from dtrain.errors import why
from dtrain.launcher import process
from dtrain.launcher.local.link import Link

GREET_SECONDS = 10.0
"""Time for a node and the server to prove to each other that they know the secret."""
STRANGERS = 32
"""The most unproved connections at once; the oldest makes room for the next."""


class Door:
    """Listens at `address` alone. `memory`: the folder for the secret of agents on this host.

    Raises OSError if the address cannot be used, or not without a secret.
    """

    def __init__(self, address: str, memory: Path, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._strangers: dict[Link, float] = {}
        """Unproved connection -> when it was opened"""
        try:
            host, port = network.endpoint(address)
            if weakness := network.weakness(host, os.environ):
                raise ValueError(weakness)
            self._socket = network.listen(host, port)
        except (OSError, UnicodeError) as error:
            reason = why(error) if isinstance(error, OSError) else "it is no name of a host"
            sentence = f"launcher.address={address}: {reason}. Type one of this host that is free"
            raise OSError(getattr(error, "errno", None), sentence) from error
        except ValueError as error:
            raise OSError(None, f"launcher.address={address}: {error}") from error
        self._socket.setblocking(False)
        self.here, port = self._socket.getsockname()[:2]
        """The address of this host that it listens at."""
        self._secret = os.environ.get(environment.SECRET, "").encode() or _write_secret(memory, port)
        selector.register(self._socket, selectors.EVENT_READ, self)

    def accept(self) -> None:
        """Accept a connection."""
        with contextlib.suppress(OSError):  # the peer has left again, or no file can be opened now
            link = Link(self._socket.accept()[0], "server", secret=self._secret)
            if len(self._strangers) >= STRANGERS:
                self._dismiss(min(self._strangers, key=self._strangers.__getitem__))
            self._strangers[link] = time.monotonic()
            self._selector.register(link, selectors.EVENT_READ, link)

    def hear(self, link: Link) -> str | None:
        """Read from an unproved connection: the name of its host once it has proved itself."""
        if link not in self._strangers:  # dismissed a moment ago
            return None
        try:
            for message in link.receive():
                if message["do"] == "join":
                    del self._strangers[link]
                    self._selector.unregister(link)
                    return str(message["host"])
        except ConnectionError:
            self._dismiss(link)
        return None

    def dismiss_late(self) -> None:
        for link in [link for link, since in self._strangers.items() if time.monotonic() - since > GREET_SECONDS]:
            self._dismiss(link)

    def _dismiss(self, link: Link) -> None:
        del self._strangers[link]
        self._selector.unregister(link)
        link.hang_up()

    def close(self) -> None:
        """Close the sockets in a forked child."""
        self._socket.close()
        for link in self._strangers:
            link.close()


def knock(address: str) -> Link:
    """An unproved link to `address`. Raises ConnectionError."""
    host, port = network.endpoint(address)
    secret = os.environ.get(environment.SECRET, "").encode() or _secret_here(port)
    if secret is None:
        raise ConnectionError(
            f"no run of this user listens there; where it has a {environment.SECRET}, set the same one here"
        )
    try:
        end = socket.create_connection((host, port), timeout=5)
    except OSError as error:
        raise ConnectionError(str(error)) from error
    try:
        return Link(end, "agent", secret=secret)
    except ConnectionError:
        end.close()
        raise


# the secret of one user on one host


def _write_secret(memory: Path, port: int) -> bytes:
    """A secret that only processes of this user on this host can read."""
    secret = secrets.token_hex(32).encode()
    path = memory / f"door-{port}"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(secret)
    return secret


def _secret_here(port: int) -> bytes | None:
    """The secret of this user's newest run that listens at this port."""
    files = list[tuple[float, Path]]()
    for folder in process.memories():
        with contextlib.suppress(OSError):
            path = folder / f"door-{port}"
            if folder.lstat().st_uid == path.lstat().st_uid == os.getuid():
                files.append((path.lstat().st_mtime, path))
    return max(files)[1].read_bytes() if files else None
