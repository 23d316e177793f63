"""How the server and its agents talk: JSON, one message a line, over a stream socket."""

import contextlib
import json
import selectors
import socket
from typing import Any

SEND_SECONDS = 5.0
"""A peer that takes nothing for so long is gone."""


class Link:
    """One end. `receive` when a select says so; a lost peer raises ConnectionError in both directions."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._rest = end, b""
        end.settimeout(SEND_SECONDS)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived whole; waits for bytes if there are none."""
        try:
            data = self._socket.recv(1 << 20)
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not data:
            raise ConnectionError("the other end is closed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def here(self) -> str:
        """This end's address."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        self._socket.close()


def drain(waker: socket.socket) -> None:
    """Empty what a signal wrote."""
    with contextlib.suppress(BlockingIOError):
        while waker.recv(4096):
            pass


def ready(selector: selectors.BaseSelector, seconds: float) -> list[Any]:
    """What can be read now, or within `seconds`."""
    return [key.data for key, _ in selector.select(max(0.0, seconds))]
