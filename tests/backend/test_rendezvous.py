"""The store at which ranks meet: reached, watched, and missed within a bound."""

import datetime
import errno
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from launching import free_port
from pool import ranks

from dtrain.backend import rendezvous
from dtrain.backend.gloo import Gloo
from dtrain.errors import PreflightError
from dtrain.launcher import process
from dtrain.lifecycle import signals, unwatched


def test_a_lost_connection_to_the_store_is_tried_again() -> None:
    def once_lost() -> tuple[int, int]:
        real, tries = rendezvous.TCPStore, []

        def flaky(*arguments: Any, **options: Any) -> Any:
            tries.append(options["timeout"])
            if len(tries) == 1:
                raise RuntimeError("the connection is lost")
            return real(*arguments, **options)

        rendezvous.TCPStore = flaky  # type: ignore[misc, assignment]
        with Gloo(timeout=30).open():
            return int(os.environ["RANK"]), len(tries)

    assert ranks(2, once_lost) == [(0, 2), (1, 2)]


def test_nobody_leaves_a_group_that_another_rank_still_joins(tmp_path: Path) -> None:
    """Whoever connects to a rank that has gone says that it crashed."""

    def work() -> bool:
        real = dist.init_process_group

        def late(*arguments: Any, **options: Any) -> None:
            real(*arguments, **options)
            if os.environ["RANK"] == "1":
                time.sleep(0.5)
                (tmp_path / "joined").touch()

        dist.init_process_group = late
        with Gloo(timeout=30).open():
            return (tmp_path / "joined").exists()

    assert ranks(2, work) == [True, True]


def test_who_opens_the_store_under_an_address_of_a_router_listens_at_all_of_its_own() -> None:
    """127.0.0.3 plays the router's, which leads here."""

    def answered() -> bool:
        def listen(host: str, port: int) -> socket.socket:
            raise OSError(errno.EADDRNOTAVAIL, f"{host} is the router's")

        rendezvous.network.listen, port = listen, free_port()  # type: ignore[assignment]
        store = rendezvous.connect("127.0.0.3", port, 1, is_master=True, shared=False, seconds=20, wait=20)
        socket.create_connection(("127.0.0.4", port), timeout=5).close()
        return store.port == port

    assert ranks(1, answered) == [True]


def ended(folder: Path, then: Callable[[int], None], *, timeout: float, wish: bool = False) -> tuple[int, str]:
    """The exit code of a rank that computes for ever, and what it said, when `then(pid of its store)` happens to it."""
    store_pid, port = process.fork_store()
    reading, writing = os.pipe()

    def rank() -> None:
        os.environ.update(
            RANK="0",
            WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        os.environ["DTRAIN_REPORTS"] = str(folder)
        with Gloo(timeout=timeout).open():
            signals.listen()
            os.write(writing, b"1")
            time.sleep(600)

    pid = process.fork(rank)
    os.close(writing)
    try:
        assert os.read(reading, 1), "it did not come to the store"
        then(store_pid)
        if wish:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 120
        while (code := process.ended(pid)) is None:
            assert time.monotonic() < deadline, "it still runs"
            time.sleep(0.02)
    finally:
        process.kill(pid, store_pid)
        os.close(reading)
    errors = [json.loads(path.read_text()) for path in folder.glob("lost-*.json")]
    assert len(errors) == 1
    return code, errors[0]["error"]


@pytest.mark.campaign("kills")
def test_a_dead_store_ends_the_run(tmp_path: Path) -> None:
    code, message = ended(tmp_path, process.kill, timeout=12)
    assert code == 1
    assert message.startswith("the rendezvous store at 127.0.0.1:")
    assert "is gone" in message


@pytest.mark.campaign("signals")
def test_a_stopped_store_ends_the_run_within_its_bound(tmp_path: Path) -> None:
    code, message = ended(tmp_path, lambda store_pid: os.kill(store_pid, signal.SIGSTOP), timeout=6)
    assert code == 1
    assert "the store process at 127.0.0.1:" in message
    assert "does not answer for" in message


def test_a_rank_that_was_stopped_itself_does_not_blame_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop is closed for a night: its clock goes on, and its first look finds a request without an answer."""
    looks, messages = iter([0.0, *(1e5 * look for look in range(1, 21))]), list[str]()
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: next(looks, 2e6)))
    monkeypatch.setattr(unwatched, "give_up", lambda *words, **_: messages.append(words[2]))
    watch = rendezvous.StoreWatch(None, "here", seconds=0.04, rank=0)
    watch._asked = 0.0
    monkeypatch.setattr(watch, "_over", SimpleNamespace(wait=lambda _: next(over), is_set=lambda: False))
    over = iter([*[False] * 20, True])
    watch._watch()
    assert not messages


@pytest.mark.parametrize("seconds", [10.0, 15.0, 600.0])
def test_a_silent_store_is_told_before_who_waits_for_one_that_asks_it(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has been stopped at 0; the watch asks it as late as it may."""
    now, told = [0.0], list[float]()

    def wait(pause: float) -> bool:
        now[0] += pause
        return bool(told)

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(unwatched, "give_up", lambda *_, **__: told.append(now[0]))
    watch = rendezvous.StoreWatch(None, "here", seconds=seconds, rank=0)
    now[0] = watch._asked = watch._period
    monkeypatch.setattr(watch, "_over", SimpleNamespace(wait=wait, is_set=lambda: False))
    watch._watch()
    assert rendezvous.BUSY_SECONDS < told[0] <= seconds


@pytest.mark.campaign("signals")
def test_a_wish_to_stop_does_not_wait_for_a_stopped_store(tmp_path: Path) -> None:
    code, message = ended(tmp_path, lambda store_pid: os.kill(store_pid, signal.SIGSTOP), timeout=600, wish=True)
    assert code == 75
    assert "does not answer" in message


@pytest.mark.campaign("signals")
def test_a_stopped_store_is_named_by_who_wants_to_meet_there() -> None:
    """And a signal gets through meanwhile."""
    store_pid, port = process.fork_store()
    os.kill(store_pid, signal.SIGSTOP)
    try:
        assert (
            f"the store process at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) does not answer"
            in ranks(1, refusal, "127.0.0.1", port, False)[0]
        )

        def terminated() -> None:
            with signals.ending():
                rendezvous.connect("127.0.0.1", port, 1, is_master=False, shared=True, seconds=60, wait=60)

        pid = process.fork(terminated)
        time.sleep(0.5)
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 120
        while process.ended(pid) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill(store_pid)


def test_a_wish_to_stop_ends_a_rank_that_waits_for_ranks_that_do_not_come() -> None:
    store_pid, port = process.fork_store()
    reading, writing = os.pipe()

    def alone() -> None:
        os.environ.update(
            RANK="0",
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        real = dist.init_process_group

        def meet(*arguments: Any, **options: Any) -> None:
            os.write(writing, b"1")
            real(*arguments, **options)

        dist.init_process_group = meet
        with signals.ending(), Gloo(timeout=60).open():
            pass

    pid = process.fork(alone)
    os.read(reading, 1)
    time.sleep(1)
    try:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 120
        while process.ended(pid) is None:
            assert time.monotonic() < deadline, "it still waits"
            time.sleep(0.01)
    finally:
        process.kill(pid, store_pid)
    os.close(reading)
    os.close(writing)


def refusal(host: str, port: int, is_master: bool, seconds: float = 1) -> str:
    with pytest.raises(PreflightError) as refused:
        rendezvous.connect(host, port, 2, is_master=is_master, shared=False, seconds=seconds, wait=seconds)
    return str(refused.value)


def test_a_port_in_use_and_a_name_nobody_knows_are_refused_in_a_sentence() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        message = refusal("127.0.0.1", port, True)
    assert (
        message
        == f"rank 0 cannot open the store at 127.0.0.1:{port}: the port is in use. Set MASTER_PORT to a free port."
    )
    assert refusal("no-such-host.invalid", 29500, False).startswith("MASTER_ADDR=no-such-host.invalid: ")
    assert refusal("127.0.0.1", port, False).startswith(
        f"there is no store at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) after 1 s: "
    )


def reached(port: int) -> list[str]:
    """Those of this host's addresses at which this port answers."""
    addresses = []
    for address in ("127.0.0.1", "127.0.0.2", "127.0.1.1"):
        with socket.socket() as end:
            if end.connect_ex((address, port)) == 0:
                addresses.append(address)
    return addresses


def test_the_store_of_rank_0_listens_where_it_was_named_and_nowhere_else() -> None:
    def opened() -> list[str]:
        port = free_port()
        store = rendezvous.connect("127.0.0.2", port, 1, is_master=True, shared=False, seconds=30, wait=30)
        assert store.num_keys() >= 0
        return reached(port)

    assert ranks(1, opened) == [["127.0.0.2"]]


def test_a_name_that_leads_only_this_host_to_its_loopback_is_opened_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian has it: 127.0.1.1 in the /etc/hosts of the host itself."""
    real, port = socket.getaddrinfo, free_port()
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: real("127.0.1.1" if host == "node7" else host, *rest, **more)
    )
    monkeypatch.setattr(
        rendezvous, "TCPStore", lambda *_, master_listen_fd, **__: socket.socket(fileno=master_listen_fd)
    )
    with rendezvous._open("node7", port, 2, timeout=datetime.timedelta(seconds=30)):  # type: ignore[attr-defined]
        assert reached(port) == ["127.0.0.1", "127.0.0.2", "127.0.1.1"]


def test_who_gives_up_gives_its_lease_back(tmp_path: Path) -> None:
    from dtrain.storage import lease

    def holder() -> None:
        with lease.hold(str(tmp_path / "out")):
            unwatched.give_up(None, 0, "planned")

    pid = process.fork(holder)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert lease.holder(str(tmp_path / "out")) == ("free", "")
