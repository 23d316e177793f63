"""The connection between the server and an agent: JSON, one message a line, over a stream socket.

Between hosts both ends know a secret, and neither sends it. Each begins with a random nonce; the nonces and the secret
give the keys of this connection, a pair for each direction. Every later line is a message masked with one key and
signed, together with its number, with the other (HMAC-SHA256). A message that is replayed, reflected, dropped or
changed ends the link, and JSON of a peer that does not know the secret is never parsed.
"""

import base64
import contextlib
import hashlib
import hmac
import json
import re
import secrets
import selectors
import socket
from collections.abc import Mapping
from typing import Any, Literal

SEND_SECONDS = 5.0
"""A peer that accepts no bytes for this long is lost."""
LONGEST = 64 << 20
"""The most bytes of a line: the files that the ranks of a node write in a round."""
PROTOCOL = b"2"
"""Changes with the messages below."""
HELLO = re.compile(rb"dtrain ([0-9]{1,9}) ([0-9a-f]{64})")
Role = Literal["server", "agent"]
LONGEST_OF_STRANGERS: Mapping[Role, int] = {"server": 4 << 10, "agent": 4 << 20}
"""The most bytes of a line that the server or an agent accepts from an unproved peer: a host name, and a plan."""
Kinds = type | tuple[type, ...]
FROM: Mapping[Role, Mapping[str, Mapping[str, Kinds]]] = {
    "agent": {
        "join": {"host": str},
        "ready": {},
        "unfit": {"why": str},
        "leaving": {},
        "beat": {"number": int},
        "failed": {"round": int, "victim": bool},
        "ended": {"round": int, "files": dict},
        "done": {"round": int, "files": dict},
    },
    "server": {
        "welcome": {"plan": dict, "storage": str, "silence": (int, float), "environment": dict, "same": dict},
        "refused": {"why": str},
        "heard": {"number": int},
        "start": {"round": int, "first": int, "nodes": int, "group": int, "passed": (int, float), "environment": dict},
        "stop": {"number": int},
        "end": {"round": int, "known": str},
        "bye": {"exit_code": int},
    },
}
"""Sender -> its messages (`do`) -> their fields."""


class Link:
    """One end of a connection. Call `receive` when a select reports it readable; a lost peer raises ConnectionError in
    both directions.

    `secret`: the peer must know it too; None for a peer that this process has forked.
    """

    def __init__(self, end: socket.socket, role: Role, *, secret: bytes | None = None) -> None:
        self._socket, self._role, self._secret, self._rest = end, role, secret, bytearray()
        self._hears = FROM["agent" if role == "server" else "server"]
        self._seal: _Seal | None = None
        self.proved = secret is None
        """Whether the peer has shown that it knows the secret."""
        end.settimeout(SEND_SECONDS)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if secret is not None:
            self._nonce = secrets.token_hex(32).encode()
            self._write(b"dtrain " + PROTOCOL + b" " + self._nonce)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message; between hosts only after the peer's nonce has arrived (`has_begun`)."""
        assert self.has_begun
        line = json.dumps(message).encode()
        self._write(self._seal.close(line) if self._seal else line)

    def _write(self, line: bytes) -> None:
        try:
            self._socket.sendall(line + b"\n")
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def receive(self) -> list[dict[str, Any]]:
        """The messages that are complete; waits for bytes if there are none."""
        try:
            data = self._socket.recv(1 << 20)
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not data:
            raise ConnectionError("the other end is closed")
        self._rest += data
        if b"\n" not in data:
            self._bound(self._rest)
            return []
        *lines, self._rest = self._rest.split(b"\n")
        messages = [message for line in lines if (message := self._message(bytes(line))) is not None]
        self._bound(self._rest)
        return messages

    def _bound(self, line: bytes | bytearray) -> None:
        if len(line) > (most := LONGEST if self.proved else LONGEST_OF_STRANGERS[self._role]):
            raise ConnectionError(f"the other end sends a line of more than {most} bytes")

    def _message(self, line: bytes) -> dict[str, Any] | None:
        """The message of a line; None for the line with the peer's nonce. Raises ConnectionError for anything else."""
        self._bound(line)
        if self._secret is not None and self._seal is None:
            hello = HELLO.fullmatch(line)
            if hello is None:
                raise ConnectionError("the other end is no dtrain process")
            if hello[1] != PROTOCOL:
                raise ConnectionError(
                    f"the other end speaks protocol {hello[1].decode()} and this one {PROTOCOL.decode()}: install the "
                    "same dtrain on both"
                )
            self._seal = _Seal(self._secret, self._role, self._nonce, hello[2])
            return None
        text = self._seal.open(line) if self._seal else line
        self.proved = True
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConnectionError("the other end sends what is no message") from error
        kinds = self._hears.get(str(message.get("do"))) if isinstance(message, dict) else None
        if kinds is None or not _fits(message, kinds):
            raise ConnectionError("the other end sends what is no message")
        return dict(message)

    @property
    def has_begun(self) -> bool:
        """Whether messages can be sent."""
        return self._secret is None or self._seal is not None

    @property
    def here(self) -> str:
        """This end's address."""
        return str(self._socket.getsockname()[0])

    def hang_up(self) -> None:
        """Close both directions, even if a process forked meanwhile holds this end too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.close()

    def close(self) -> None:
        self._socket.close()


def _fits(message: Mapping[str, Any], fields: Mapping[str, Kinds]) -> bool:
    if message.keys() != {"do", *fields}:
        return False
    pairs = ((message[name], kinds) for name, kinds in fields.items())
    return all(isinstance(value, kinds) and isinstance(value, bool) == (kinds is bool) for value, kinds in pairs)


class _Seal:
    """Signs and masks the lines of one connection."""

    def __init__(self, secret: bytes, role: Role, ours: bytes, theirs: bytes) -> None:
        numbers = ours + theirs if role == "server" else theirs + ours

        def key(use: str, sender: Role) -> bytes:
            return hmac.digest(secret, f"dtrain {use} of {sender} ".encode() + numbers, "sha256")

        other: Role = "agent" if role == "server" else "server"
        self._out = (key("signature", role), key("mask", role))
        self._in = (key("signature", other), key("mask", other))
        self._sent = self._opened = 0

    def close(self, text: bytes) -> bytes:
        sign, mask = self._out
        number = self._sent.to_bytes(8, "big")
        self._sent += 1
        body = _masked(text, mask, number)
        return base64.b64encode(hmac.digest(sign, number + body, "sha256") + body)

    def open(self, line: bytes) -> bytes:
        """The text. Raises ConnectionError unless the peer closed it as the next line of this connection."""
        sign, mask = self._in
        number = self._opened.to_bytes(8, "big")
        self._opened += 1
        try:
            data = base64.b64decode(line, validate=True)
        except ValueError as error:
            raise ConnectionError("the other end does not know the secret") from error
        signature, body = data[:32], data[32:]
        if not hmac.compare_digest(signature, hmac.digest(sign, number + body, "sha256")):
            raise ConnectionError("the other end does not know the secret")
        return _masked(body, mask, number)


def _masked(text: bytes, key: bytes, number: bytes) -> bytes:
    """`text` XOR a stream of key and number; the same call unmasks it."""
    stream = hashlib.shake_256(key + number).digest(len(text))
    return (int.from_bytes(text, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(text), "big")


def drain(waker: socket.socket) -> None:
    """Discard the bytes that signals wrote."""
    with contextlib.suppress(BlockingIOError):
        while waker.recv(4096):
            pass


def ready(selector: selectors.BaseSelector, seconds: float) -> list[Any]:
    """The sources that are readable within `seconds`."""
    return [key.data for key, _ in selector.select(max(0.0, seconds))]
