"""Messages between the server and its agents: what a peer of the same run says is heard, and nothing else."""

import base64
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import pytest

from dtrain.launcher.local.link import FROM, LONGEST_OF_STRANGERS, Link

SECRET = b"a secret of this run"
WELCOME = {"do": "welcome", "plan": {"trust": []}, "storage": "s3://key", "silence": 15, "environment": {}, "same": {}}


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    """The server's link to a process that it forked, and that one's end."""
    here, there = socket.socketpair()
    with here, there:
        yield Link(here, "server"), there


def test_messages_arrive_whole_however_they_were_cut(pair: tuple[Link, socket.socket]) -> None:
    link, there = pair
    there.sendall(b'{"do": "beat", "num')
    assert link.receive() == []
    there.sendall(b'ber": 1}\n{"do": "ready"}\n{"do"')
    assert link.receive() == [{"do": "beat", "number": 1}, {"do": "ready"}]


def test_a_lost_peer_is_one_error_in_both_directions(pair: tuple[Link, socket.socket]) -> None:
    link, there = pair
    there.close()
    with pytest.raises(ConnectionError):
        link.receive()
    with pytest.raises(ConnectionError):
        link.send(do="heard", number=1)


@contextmanager
def sent(end: socket.socket, data: bytes) -> Iterator[None]:
    """More than a socket holds is on its way during the context."""

    def send() -> None:
        with suppress(OSError):
            end.sendall(data)

    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        end.shutdown(socket.SHUT_RDWR)
        sending.join()


NONE = [
    b"", b"{", b"[]", b"null", b"1", b'"beat"', b"{}", b'{"do": null}', b'{"do": []}', b'{"do": "dance"}', b'{"do": "bye"}', b'{"do": "beat"}',
    b'{"do": "beat", "number": "1"}', b'{"do": "beat", "number": true}', b'{"do": "beat", "number": 1, "more": 1}', b'{"do": "ready", "node": 1}',
    b'{"do": "done", "round": 0, "files": []}', b"[" * 100_000, b'{"do":' * 100_000, b"\xff\xfe", b'{"do": "beat", "number": ' + b"9" * 5000 + b"}",
]  # fmt: skip


@pytest.mark.parametrize("line", NONE, ids=lambda line: line[:30])
def test_what_no_agent_says_is_a_lost_peer(line: bytes, pair: tuple[Link, socket.socket]) -> None:
    """And no other error: the server lives on."""
    link, there = pair
    with sent(there, line + b"\n"), pytest.raises(ConnectionError):
        while True:
            link.receive()


class Wire:
    """Two ends that know each a secret, and between them somebody who reads and writes what is sent."""

    def __init__(self, server: bytes = SECRET, agent: bytes = SECRET) -> None:
        here, self.at_server = socket.socketpair()
        there, self.at_agent = socket.socketpair()
        self.server, self.agent = Link(here, "server", secret=server), Link(there, "agent", secret=agent)
        self.seen = b""
        for end in (self.at_server, self.at_agent):
            end.settimeout(5)

    def close(self) -> None:
        for end in (self.server, self.agent, self.at_server, self.at_agent):
            end.close()

    def taken(self, end: socket.socket) -> bytes:
        data = end.recv(1 << 20)
        self.seen += data
        return data

    def greeted(self) -> "Wire":
        self.at_agent.sendall(self.taken(self.at_server))
        self.at_server.sendall(self.taken(self.at_agent))
        assert self.server.receive() == self.agent.receive() == []
        return self

    def line(self, sender: str, **message: Any) -> bytes:
        """What one of them sends, taken from the wire."""
        link, end = (self.agent, self.at_agent) if sender == "agent" else (self.server, self.at_server)
        link.send(**message)
        return self.taken(end)


Wires = Callable[..., Wire]


@pytest.fixture
def wired() -> Iterator[Wires]:
    with ExitStack() as stack:
        yield lambda **secrets: stack.enter_context(closing(Wire(**secrets)))


def test_who_knows_the_secret_is_heard_and_nothing_is_read_off_the_wire(wired: Wires) -> None:
    wire = wired().greeted()
    wire.at_server.sendall(wire.line("agent", do="join", host="a name of mine"))
    assert wire.server.receive() == [{"do": "join", "host": "a name of mine"}]
    wire.at_agent.sendall(wire.line("server", **WELCOME))
    assert wire.agent.receive() == [WELCOME]
    assert wire.agent.proved and wire.server.proved
    seen = wire.seen + b"".join(base64.b64decode(line + b"===", validate=False) for line in wire.seen.split(b"\n"))
    assert not [word for word in (SECRET, SECRET.hex().encode(), b"name of mine", b"welcome", b"s3://") if word in seen]


def test_two_connections_have_nothing_in_common(wired: Wires) -> None:
    lines = [wired().greeted().line("agent", do="ready") for _ in range(2)]
    assert lines[0] != lines[1]
    wire = wired().greeted()
    wire.at_server.sendall(lines[0])
    with pytest.raises(ConnectionError, match="does not know the secret"):
        wire.server.receive()


@pytest.mark.parametrize("theirs", [b"", b"guess", SECRET + b"x"])
def test_who_does_not_know_it_is_not_heard(theirs: bytes, wired: Wires) -> None:
    wire = wired(agent=theirs).greeted()
    wire.at_server.sendall(wire.line("agent", do="join", host=""))
    with pytest.raises(ConnectionError, match="does not know the secret"):
        wire.server.receive()
    wire.at_agent.sendall(wire.line("server", **WELCOME))
    with pytest.raises(ConnectionError, match="does not know the secret"):
        wire.agent.receive()
    assert not wire.server.proved and not wire.agent.proved


@pytest.mark.parametrize("change", ["repeated", "left out", "swapped", "sent back", "turned", "cut"])
def test_who_only_sits_between_can_change_nothing(change: str, wired: Wires) -> None:
    wire = wired().greeted()
    first, second = wire.line("agent", do="join", host="a"), wire.line("agent", do="ready")
    turned = bytearray(base64.b64decode(first))
    turned[-1] ^= 1
    said = {
        "repeated": first + first, "left out": second, "swapped": second + first, "turned": base64.b64encode(turned) + b"\n", "cut": first[:40] + b"\n",
        "sent back": wire.line("server", do="bye"),
    }[change]  # fmt: skip
    wire.at_server.sendall(said)
    with pytest.raises(ConnectionError, match="does not know the secret"):
        wire.server.receive()


@pytest.mark.parametrize("role", FROM)
def test_a_stranger_says_little_and_none_of_it_is_read_as_json(role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("it was read"))
    chance = secrets.token_hex(32).encode()
    for said in (
        b'{"do": "join", "host": "a", "secret": ""}\n',
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"dtrain 2 " + chance + b"\n{}\n",
        b"x" * (LONGEST_OF_STRANGERS[role] + 1),
    ):
        here, there = socket.socketpair()
        with here, there:
            link = Link(here, role, secret=SECRET)
            with sent(there, said), pytest.raises(ConnectionError):
                while True:
                    link.receive()


def test_another_protocol_is_named() -> None:
    ours, theirs = socket.socketpair()
    with closing(Link(ours, "agent", secret=SECRET)) as link, theirs:
        theirs.sendall(b"dtrain 1 " + b"0" * 64 + b"\n")
        with pytest.raises(ConnectionError, match="speaks protocol 1 and this one 2: install the same dtrain on both"):
            link.receive()
