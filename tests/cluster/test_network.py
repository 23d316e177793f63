"""Which addresses are this host's own, which need a secret, and where ranks listen."""

import os
import socket

import pytest

from dtrain.cluster import network


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:x", "host:70000", "host:-1", "0.0.0.0:1", "[::]:1", "host:\u0661"]
)
def test_what_is_no_address_of_one_host(address: str) -> None:
    with pytest.raises(ValueError, match=r"host|interface"):
        network.endpoint(address)


def test_addresses() -> None:
    assert network.endpoint("node7:29400") == ("node7", 29400)
    assert network.endpoint("[::1]:29400") == ("::1", 29400)


@pytest.mark.parametrize(("host", "secret", "message"), [
    ("127.0.0.1", "", ""), ("127.0.1.1", "", ""), ("localhost", "", ""), ("::1", "", ""), ("192.0.2.7", "", "is not set"), ("no-such-host.invalid", "", "is not set"),
    ("x" * 300, "", "is not set"), ("192.0.2.7", "0123456789abcdef", ""), ("192.0.2.7", "0123456789", "has 10 characters"), ("127.0.0.1", "0123456789", "has 10 characters"),
])  # fmt: skip
def test_no_secret_no_address_but_loopback(host: str, secret: str, message: str) -> None:
    problem = network.weakness(host, {"DTRAIN_SECRET": secret} if secret else {})
    assert message in problem
    assert bool(problem) == bool(message)
    assert not secret or secret not in problem


def test_a_socket_listens_where_it_was_told_alone() -> None:
    with network.listen("127.0.0.2", 0) as end, socket.socket() as other:
        assert other.connect_ex(("127.0.0.1", end.getsockname()[1])) != 0


@pytest.mark.skipif(not network.interfaces(), reason="only Linux tells the addresses of its interfaces")
def test_ranks_of_one_host_listen_on_loopback_for_as_long_as_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    with network.on_loopback():
        assert network.interfaces()[os.environ["GLOO_SOCKET_IFNAME"]].startswith("127.")
        assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7", "what a user says stays"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    assert network.sockets("192.0.2.7") == {}, "of no interface of this host"
