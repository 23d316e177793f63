"""Where nodes of other hosts join a run. Who does not prove at once that it knows the run's secret is a stranger: it is
let go, and the run goes on.
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
"""Within this time a node and the server have proved themselves to each other."""
STRANGERS = 32
"""So many may be at the door at once; the longest there makes room for the next."""


class Door:
    """Listens at `address`, and nowhere else. `memory`: the folder in which the run's secret for this host's own agents
    lies.

    Raises OSError where the address cannot be listened at, or may not without a secret.
    """

    def __init__(self, address: str, memory: Path, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._strangers: dict[Link, float] = {}
        """Since when each of them is there."""
        try:
            host, port = network.endpoint(address)
            if weakness := network.weakness(host, os.environ):
                raise ValueError(weakness)
            self._socket = network.listen(host, port)
        except (OSError, UnicodeError) as error:
            said = why(error) if isinstance(error, OSError) else "it is no name of a host"
            raise OSError(
                getattr(error, "errno", None), f"launcher.address={address}: {said}. Type one of this host that is free"
            ) from error
        except ValueError as error:
            raise OSError(None, f"launcher.address={address}: {error}") from error
        self._socket.setblocking(False)
        self.here, port = self._socket.getsockname()[:2]
        """The address of this host that it is."""
        self._secret = os.environ.get(environment.SECRET, "").encode() or _leave(memory, port)
        selector.register(self._socket, selectors.EVENT_READ, self)

    def accept(self) -> None:
        """Somebody is there."""
        with contextlib.suppress(OSError):  # it has left again, or no file can be opened now; a ConnectionError is one
            link = Link(self._socket.accept()[0], "server", secret=self._secret)
            if len(self._strangers) >= STRANGERS:
                self._dismiss(min(self._strangers, key=self._strangers.__getitem__))
            self._strangers[link] = time.monotonic()
            self._selector.register(link, selectors.EVENT_READ, link)

    def hear(self, link: Link) -> str | None:
        """Read from a stranger: the name of its host once it has proved itself."""
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
        """In a child, which has nothing to do with it."""
        self._socket.close()
        for link in self._strangers:
            link.close()


def knock(address: str) -> Link:
    """A link to whoever listens at `address`, which has proved nothing yet. Raises ConnectionError."""
    host, port = network.endpoint(address)
    secret = os.environ.get(environment.SECRET, "").encode() or _found(port)
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


# of one user, on one host


def _leave(memory: Path, port: int) -> bytes:
    """A secret that only processes of this user on this host can read."""
    secret = secrets.token_hex(32).encode()
    path = memory / f"door-{port}"
    path.unlink(missing_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(secret)
    return secret


def _found(port: int) -> bytes | None:
    """The secret of the run of this user that listens at this port, the newest."""
    found = list[tuple[float, Path]]()
    for folder in process.memories():
        with contextlib.suppress(OSError):
            path = folder / f"door-{port}"
            if folder.lstat().st_uid == path.lstat().st_uid == os.getuid():
                found.append((path.lstat().st_mtime, path))
    return max(found)[1].read_bytes() if found else None
