"""Messages between the server and its agents."""

import socket
from collections.abc import Iterator

import pytest

from dtrain.launcher.link import Link


@pytest.fixture
def pair() -> Iterator[tuple[Link, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield Link(here), there


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
        link.send(do="beat", number=1)
