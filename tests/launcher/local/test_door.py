"""A run, its door, and who has no business there: strangers find out nothing, nothing of what they say is done, and the run goes on."""

import base64
import contextlib
import json
import os
import random
import re
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from killing import below, over, served
from launching import WORDS, free_port, plan_of, started, steps_of, wait_for_step
from pool import ranks
from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported without saying so

from dtrain.cluster import network
from dtrain.launcher import process
from dtrain.launcher.local import door
from dtrain.launcher.local.agent import greet, join
from dtrain.launcher.local.door import knock
from dtrain.launcher.local.link import FROM, Link

SECRET = "0123456789abcdef0123456789abcdef"
SLOW = ("model._target_=launching.Slow", "model.rank=0", "model.seconds=0.02", "batch=8", "launcher=local")
CAPABILITY = "-all,+dac_read_search"
NOBODY = [
    "setpriv",
    "--reuid=65534",
    "--clear-groups",
    f"--inh-caps={CAPABILITY}",
    f"--ambient-caps={CAPABILITY}",
    f"--bounding-set={CAPABILITY}",
]
"""A command as a user who is not root, who may read all: also the files of root."""


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_SECRET", SECRET)


def opened(address: str) -> socket.socket:
    """A connection to the run's door, as soon as it is open."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(network.endpoint(address), timeout=10)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def known(address: str) -> Link:
    """A link of somebody who knows the secret."""
    opened(address).close()
    return knock(address)


# who knocks at the run


def malformed(chance: random.Random) -> bytes:
    """A message that no agent of this run sends."""
    join = {"do": "join", "host": "evil", "secret": ""}
    hello = b"dtrain 2 " + chance.randbytes(32).hex().encode() + b"\n"
    return chance.choice([
        b"", b"\n", b"\n\n\n", b"[" * chance.randrange(1, 1 << 18) + b"\n", b'{"do":' * 50_000 + b"\n", b"null\n", b'"join"\n', b"{}\n", b"GET / HTTP/1.1\r\n\r\n",
        json.dumps(join).encode() + b"\n", json.dumps(join)[: chance.randrange(1, 30)].encode(), json.dumps(join | {"do": "bye"}).encode() + b"\n",
        hello, hello[: chance.randrange(1, 60)], hello + b"{}\n", hello + json.dumps(join).encode() + b"\n", hello + base64.b64encode(chance.randbytes(99)) + b"\n", hello * 3,
        hello + b"A" * chance.randrange(1, 1 << 18), chance.randbytes(chance.randrange(1, 1 << 16)), b"\x80\x04cposix\nsystem\n(S'true'\ntR.\n",
        b"\x16\x03\x01\x02\x00\x01", b"9" * 100_000 + b"\n", b"\xff" * 1000 + b"\n", json.dumps({"do": "done", "round": 0, "files": {"result.json": "e30="}}).encode() + b"\n",
    ])  # fmt: skip


@pytest.mark.campaign("fuzz")
def test_two_hundred_malformed_messages_and_the_run_goes_on(secret: None, tmp_path: Path) -> None:
    chance, address, out = random.Random(14), f"127.0.0.1:{free_port()}", tmp_path / "run"
    with (
        served(plan_of(out, *SLOW, "nodes=2", "steps=40"), tmp_path, address=address, here=1) as server,
        contextlib.ExitStack() as stack,
    ):
        for number in range(200):
            stranger = opened(address)
            with contextlib.suppress(OSError):
                stranger.sendall(malformed(chance))
            if number % 3:
                stranger.close()
            else:  # waits for what comes
                stack.callback(stranger.close)
        agent = process.fork(lambda: join(address, 120), "dtrain-agent-far")
        assert over(server, tmp_path)["error"] is None
        assert os.waitpid(agent, 0)[1] == 0
    assert len(list((tmp_path / "round-0").glob("began-*"))) == 2


@pytest.mark.campaign("network")
def test_the_silent_are_let_go(secret: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "GREET_SECONDS", 0.5)
    address = f"127.0.0.1:{free_port()}"
    with (
        served(plan_of(tmp_path / "run", *SLOW, "nodes=2", "steps=4"), tmp_path, address=address, here=1),
        opened(address) as stranger,
    ):
        stranger.settimeout(120)
        while stranger.recv(4096):
            continue


@pytest.mark.parametrize("theirs", ["", "not the one of this run", "the same"])
def test_only_who_knows_the_secret_is_told_the_plan_and_what_the_storage_is_told(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("DTRAIN_SECRET", SECRET)
    with served(plan_of(tmp_path / "run", *SLOW, "nodes=2", "steps=1000"), tmp_path, address=address, here=1):
        opened(address).close()
        monkeypatch.setenv("DTRAIN_SECRET", SECRET if theirs == "the same" else theirs)
        if theirs == "the same":
            with contextlib.closing(knock(address)) as link:
                told = greet(link)
                assert told["plan"]["nodes"] == 2 and told["storage"]
        else:
            with pytest.raises(
                TimeoutError,
                match=r"DTRAIN_SECRET .*set the same one on both"
                if theirs
                else r"where it has a DTRAIN_SECRET, set the same one here",
            ):
                join(address, 0.1)


@pytest.mark.campaign("network")
def test_a_node_that_sends_what_none_sends_is_lost_and_the_run_goes_on(secret: None, tmp_path: Path) -> None:
    """It knows the secret, and is broken."""
    address, out = f"127.0.0.1:{free_port()}", tmp_path / "run"
    with served(plan_of(out, *SLOW, "nodes=1:2", "steps=5000"), tmp_path, address=address, here=1, wait=0.1):
        wait_for_step(out, 1)
        for message in (
            {"do": "dance"}, {"do": "beat", "number": "1"}, {"do": "join", "host": []}, {"do": "done", "round": 0, "files": {"../over.json": "e30="}},
            {"do": "ended", "round": 0, "files": {"result.json": 1}}, {"do": "ended", "round": 0, "files": {"a.json": "no base64"}}, {"do": "failed", "round": None, "victim": True},
        ):  # fmt: skip
            with contextlib.closing(known(address)) as link:
                greet(link)
                link.send(**message)
                with pytest.raises(ConnectionError):
                    while True:
                        link.receive()
        wait_for_step(out, len(steps_of(out)) + 3)
    assert not (tmp_path / "over.json").exists()
    assert len([*tmp_path.glob("round-*")]) == 1


def test_without_a_secret_it_is_the_user_who_may_join(tmp_path: Path) -> None:
    """One file says who that is, which is gone with the run."""
    address = f"127.0.0.1:{free_port()}"
    with served(plan_of(tmp_path / "run", *SLOW, "nodes=2", "steps=10"), tmp_path, address=address, here=1) as server:
        opened(address).close()
        (file,) = process.memory(tmp_path).glob("door-*")
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        agent = process.fork(lambda: join(address, 120), "dtrain-agent-far")
        assert over(server, tmp_path)["error"] is None
        assert os.waitpid(agent, 0)[1] == 0


# who waits for a node


@contextlib.contextmanager
def fake(answer: Callable[[socket.socket], Any]) -> Iterator[tuple[str, list[bytes]]]:
    """Somebody who holds the port where the run should be: its address, and all that it was sent."""
    heard = list[bytes]()
    with socket.create_server(("127.0.0.1", 0)) as end:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    victim = end.accept()[0]
                    victim.settimeout(5)
                    with victim, contextlib.suppress(OSError):
                        heard.append(victim.recv(1 << 16))
                        answer(victim)
                        while data := victim.recv(1 << 16):
                            heard.append(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{end.getsockname()[1]}", heard
        end.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def evil(tmp_path: Path) -> dict[str, Any]:
    """A welcome that runs a command where it is believed."""
    (tmp_path / "evil.py").write_text(f"import os\nos.system('touch {tmp_path}/PWNED')\n")
    plan = plan_of(tmp_path / "run", *SLOW, "nodes=2").to_dict()
    plan |= {"trust": ["evil"], "model": {"_target_": "evil.Net"}}
    return {
        "do": "welcome",
        "plan": plan,
        "storage": '{"storage": {}, "secrets": {"kept": {}, "known": []}}',
        "silence": 5,
        "environment": {},
        "same": {},
    }


@pytest.mark.campaign("network")
@pytest.mark.parametrize(
    "way",
    ["a welcome", "a greeting and a welcome", "another secret", "its own words", "drops", "deep", "long", "nothing"],
)
def test_a_fake_server_is_told_nothing_and_not_obeyed(
    way: str, secret: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("dtrain.launcher.local.agent.GREET_SECONDS", 2.0)
    welcome = json.dumps(evil(tmp_path)).encode() + b"\n"

    def guessed(victim: socket.socket) -> None:
        link = Link(victim, "server", secret=b"a guess of the secret")
        heard.append(b"")
        link._message(heard[-2].strip())  # the number of the victim
        link.send(**evil(tmp_path))

    def dropping(victim: socket.socket) -> None:
        for byte in welcome:
            victim.sendall(bytes([byte]))
            time.sleep(0.1)

    ways: dict[str, Callable[[socket.socket], Any]] = {
        "a welcome": lambda victim: victim.sendall(welcome), "a greeting and a welcome": lambda victim: victim.sendall(b"dtrain 2 " + b"0" * 64 + b"\n" + welcome),
        "another secret": guessed, "its own words": lambda victim: victim.sendall(heard[-1]), "drops": dropping,
        "deep": lambda victim: victim.sendall(b"[" * 1_000_000 + b"\n"), "long": lambda victim: victim.sendall(b"x" * (16 << 20)), "nothing": lambda victim: None,
    }  # fmt: skip
    with (
        fake(ways[way]) as (address, heard),
        pytest.raises(TimeoutError, match=r"has not proved that it knows this DTRAIN_SECRET"),
    ):
        join(address, 0.2)
    assert heard
    assert not [said for said in heard for word in (SECRET, json.dumps(socket.gethostname())) if word.encode() in said]
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.campaign("network")
def test_of_many_strangers_the_oldest_are_hung_up_on(secret: None, tmp_path: Path) -> None:
    """They hold no more than so many of the run's files, and nobody who knows the secret is kept out by them."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        port = free_port()
        entrance = door.Door(f"127.0.0.1:{port}", tmp_path, selector)
        strangers = []
        for _ in range(door.STRANGERS + 3):
            strangers.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)))
            entrance.accept()
        gone = [ended(each) for each in strangers]
        entrance.close()
    assert gone == [True] * 3 + [False] * door.STRANGERS


def ended(connection: socket.socket) -> bool:
    """Whether the other end has hung up; it greets first."""
    connection.settimeout(0.2)
    try:
        while connection.recv(1 << 12):
            pass
        return True
    except TimeoutError:
        return False


# who may listen, and be joined


AGENT = "import runpy; runpy.run_module('dtrain.launcher.local.agent', run_name='__main__', alter_sys=True)"


def refused(address: str, out: Path, **variables: str) -> Iterator[str]:
    """What a command that would listen at an address, and an agent that would join it, say in one line."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    words = [*WORDS, *SLOW, "nodes=2", "launcher.here=1", f"launcher.address='{address}'", f"out={out}"]
    for done in (commands.run(*words, env=env), commands.python("-c", AGENT, address, env=env)):
        assert done.returncode in (2, 3), done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        yield done.stderr


@pytest.mark.parametrize("secret", ["", "short"])
def test_without_a_secret_no_other_address_is_served_or_joined(secret: str, tmp_path: Path) -> None:
    for sentence in refused("192.0.2.7:29400", tmp_path / "run", DTRAIN_SECRET=secret):
        assert ("DTRAIN_SECRET has 5 characters" if secret else "DTRAIN_SECRET is not set") in sentence
        assert "secrets.token_hex(16)" in sentence


@pytest.mark.parametrize(
    "address", ["29400", ":29400", "0.0.0.0:29400", "[::]:29400", "here:port", "here:99999", "here:"]
)
def test_what_is_no_address_of_a_host_is_refused(address: str, tmp_path: Path) -> None:
    assert all(address in sentence for sentence in refused(address, tmp_path / "run"))


NEEDS_SS = pytest.mark.skipif(shutil.which("ss") is None, reason="ss tells who listens, and is not here")


def ends(pids: list[int]) -> set[str]:
    """<address>:<port> at which these processes listen."""
    said = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout
    return {
        line.split()[3]
        for line in said.splitlines()
        if {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & set(pids)
    }


@NEEDS_SS
@pytest.mark.parametrize(
    "words",
    [("nodes=2", "devices=2", "strategy=fsdp"), ("nodes=1", "devices=2", "strategy=ddp"), ("nodes=1",)],
    ids=" ".join,
)
def test_a_local_run_listens_on_loopback_alone(words: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = started(out, *SLOW[:4], *words, "steps=2000")
    try:
        wait_for_step(out, 3)
        assert {end.rpartition(":")[0] for end in ends(_family(run.pid))} == {"127.0.0.1"}
    finally:
        run.kill()
        run.communicate()


def _family(pid: int) -> list[int]:
    children = [
        int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
    ]
    return [pid, *[each for child in children for each in _family(child)]]


@NEEDS_SS
def test_a_named_address_is_the_only_one_that_is_listened_at(secret: None, tmp_path: Path) -> None:
    address = f"127.0.0.2:{free_port()}"
    with served(plan_of(tmp_path / "run", *SLOW, "nodes=1", "steps=2000"), tmp_path, address=address) as server:
        wait_for_step(tmp_path / "run", 3)
        inherited = ends([os.getpid()])  # sockets of tests before this one, which a fork has too
        assert {end.rpartition(":")[0] for end in ends([server, *below(server)["store"]]) - inherited} == {"127.0.0.2"}
        (store,) = ends(below(server)["store"]) - {address} - inherited
        names = ranks(1, _names, int(store.rpartition(":")[2]))[0]
    assert names
    assert not [name for name in names if not re.match(r"[0-9a-f]{32}attempt-0-0/", name)], "nobody can guess them"


def _names(port: int) -> list[str]:
    return TCPStore("127.0.0.2", port, is_master=False, wait_for_workers=False).list_keys()


# another user of this host

another_user = pytest.mark.skipif(
    os.getuid() != 0
    or bool(
        subprocess.run(
            ["bash", "-c", f"{' '.join(NOBODY)} {sys.executable} -c ''"], check=False, capture_output=True
        ).returncode
    ),
    reason="needs root and setpriv",
)


@pytest.mark.campaign("network")
@another_user
def test_another_user_of_this_host_neither_joins_nor_serves(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = [*NOBODY, sys.executable, "-m", "dtrain.launcher.local.agent", address, "0.1"]
    with served(plan_of(tmp_path / "run", *SLOW, "nodes=2", "steps=10"), tmp_path, address=address, here=1):
        opened(address).close()
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "TMPDIR": "/tmp"}
        )
    assert done.returncode == 1
    assert "no run of this user listens there" in done.stderr
    with (
        fake(lambda victim: victim.sendall(b"dtrain 2 " + b"0" * 64 + b"\n")) as (address, heard),
        pytest.raises(TimeoutError, match="no run of this user"),
    ):
        join(address, 0.1)
    assert not heard


NAMES = (
    "result.json",
    "failure-0-1.json",
    "failure-1-2.json",
    "report-0.json",
    "began-1.json",
    "ended-1.json",
    "lost-3.json",
    "xids-0.json",
    "gpu-1.json",
    "step-0",
    "stack-1.txt",
    "x",
)
VALUES = (None, True, -1, 0, 1.5, 1e308, "", "lost", "hung", [], {}, [1], {"world": 3}, {"a": {}})
FIELDS = ("rank", "time", "kind", "error", "message", "exit_code", "step", "host", "bus", "xids", "groups", "calls", "where", "status", "loss", "victim", "state", "wall_seconds", "samples", "stack")  # fmt: skip


def strange(chance: random.Random, round: int) -> dict[str, object]:
    """A message with the fields of one that an agent sends, and values that none has."""
    do = chance.choice([*FROM["agent"]])
    report = json.dumps(
        {field: chance.choice(VALUES) for field in chance.sample(FIELDS, chance.randrange(len(FIELDS)))}
    )
    texts = (report, report, report, "[]", "", "[" * 5000, "NaN", '{"step": 1e999}')
    files = {
        name: base64.b64encode(chance.choice(texts).encode()).decode()
        for name in chance.sample(NAMES, chance.randrange(len(NAMES)))
    }
    values = {
        "host": chance.choice(["evil", "", "a" * 300]), "why": chance.choice(["evil", "", "a" * 300]), "number": chance.choice([-1, 0, 1 << 70]), "victim": chance.random() < 0.5,
        "round": chance.choice([-1, round, round, round, round + 1, 1 << 70]), "files": files,
    }  # fmt: skip
    return {"do": do, **{field: values[field] for field in FROM["agent"][do]}}


@pytest.mark.campaign("fuzz")
def test_no_message_of_a_node_ends_the_server(secret: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that know the secret send three hundred messages at any moment of the run, also while they are counted as members."""
    monkeypatch.setattr("dtrain.launcher.local.rounds.LAST_CALL_SECONDS", 0.0)
    chance, address, out = random.Random(18), f"127.0.0.1:{free_port()}", tmp_path / "run"
    plan, sent = plan_of(out, *SLOW, "nodes=1:2", "steps=100000", "checkpoint.every=5"), 0
    with served(plan, tmp_path, address=address, here=1, wait=0.1, restarts=1000, silence=2) as server:
        wait_for_step(out, 1)
        while sent < 300:
            with contextlib.suppress(ConnectionError), contextlib.closing(known(address)) as link:
                greet(link)
                link.send(do="ready")
                waited = time.monotonic() + chance.choice([0.0, 0.0, 0.2])
                for _ in range(chance.randrange(1, 12)):
                    while time.monotonic() < waited:
                        time.sleep(0.01)
                    link.send(**strange(chance, json.loads((tmp_path / "restarts.json").read_text())["round"]))
                    sent += 1
            assert process.ended(server) is None, f"after {sent} messages"
            assert not (tmp_path / "over.json").exists(), (tmp_path / "over.json").read_text()
