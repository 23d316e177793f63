"""Nodes on hosts that ssh reaches, through an sshd for each: the losses of local nodes, and nothing left on them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import commands
import pytest
from commands import COMMAND, Forked
from killing import descendants
from ssh import hosts

from dtrain.errors import WordsError
from dtrain.launcher.bundle import bundle
from dtrain.launcher.ssh import HOST, PLACE, PROBE, Ssh, _unlike
from dtrain.testing.engine import EngineTests

SMALL = [
    "model=mlp",
    "data=synthetic",
    "objective=regression",
    "strategy=ddp",
    "nodes=2",
    "devices=2",
    "hook=[]",
    "logger=[]",
]


@pytest.fixture
def words(tmp_path: Path) -> Iterator[list[str]]:
    """The words of a run on two hosts, whose interpreter has the tests' modules."""
    tests, python = Path(__file__).parents[1], tmp_path / "a python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tests.parent}:{tests} exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    folder = tmp_path / "it's here"
    folder.mkdir()
    with hosts(tmp_path) as (names, options):
        yield [
            "launcher=ssh", f"launcher.hosts=[{','.join(names)}]", f"launcher.options='{' '.join(options)}'",
            f"launcher.python='{python}'", "launcher.address=127.0.0.1",
        ]  # fmt: skip


@pytest.mark.campaign("kills")
class TestSsh(EngineTests):
    start = Forked

    @pytest.fixture(autouse=True)
    def _hosts(self, words: list[str]) -> None:
        self.words = words


@pytest.mark.campaign("network")
def test_what_is_wrong_with_the_hosts_is_told_at_once_before_anything_starts(words: list[str], tmp_path: Path) -> None:
    place = tmp_path / "it's here"
    wrong = [word for word in words if not word.startswith("launcher.python")]
    (hosts_word,) = (word for word in words if word.startswith("launcher.hosts="))
    nobody = hosts_word.partition(",")[0] + ",127.0.0.1:9]"
    done = commands.run(*SMALL, "steps=6", *wrong, nobody, "launcher.python=/no/python", "out=a", cwd=place)
    assert done.returncode == 3
    assert "/no/python cannot import dtrain and torch in" in done.stderr
    assert "127.0.0.1:9: ssh cannot log in there without a password" in done.stderr and "Traceback" not in done.stderr
    assert "Connection refused. Try: ssh -i " in done.stderr and " -p 9 -- 127.0.0.1 true" in done.stderr
    assert not (place / "a" / "metrics.jsonl").exists()


@pytest.mark.campaign("network")
def test_another_dtrain_on_the_hosts_is_told_by_their_names(words: list[str], tmp_path: Path) -> None:
    """One that could not even be an agent: the hosts are asked before any is started."""
    place, here, python = tmp_path / "it's here", Path(__file__).parents[2], tmp_path / "a python"
    (tmp_path / "other" / "dtrain").mkdir(parents=True)
    (tmp_path / "other" / "dtrain" / "__init__.py").write_text("")
    python.write_text(python.read_text().replace(str(here), str(tmp_path / "other"), 1))
    done = commands.run(*SMALL, "steps=6", *words, "out=a", cwd=place)
    assert done.returncode == 3, done.stderr
    assert done.stderr.count(" there is not the one here. Install the same there.\n") == 2, done.stderr
    assert done.stderr.count("dtrain: ") == 2 and done.stderr.count("dtrain: 127.0.0.1:") == 2


@pytest.mark.often("answer1-*", others=pytest.mark.campaign("commands"))
@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ({}, ""),
        ({"dtrain": "0.0.1", "source": "x"}, "a: dtrain is 0.0.1 there and "),
        ({"torch": "1.0", "Python": "3.9"}, "a: torch is 1.0 there and "),
        ({"source": ""}, " there is not the one here. Install the same there."),
        ("no JSON", "a: its Python says 'no JSON' where it is asked for its versions."),
        ("", "a: its Python says 'nothing' where it is asked for its versions."),
        ("[]", "a: its Python says '[]' where it is asked for its versions."),
    ],
)
def test_the_versions_of_a_host_are_compared(answer: dict[str, str] | str, sentence: str) -> None:
    here = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True).stdout
    text = answer if isinstance(answer, str) else "a line of its own\n" + json.dumps({**json.loads(here), **answer})
    assert sentence in _unlike("a", text) and bool(sentence) == bool(_unlike("a", text))


NET = """import torch

class Net(torch.nn.Linear):
    def __init__(self, *, features: int, outputs: int):
        super().__init__(features, outputs)
        print(f"built in {__file__}")
"""


@pytest.mark.campaign("network")
def test_the_folder_is_brought_to_the_hosts(words: list[str], tmp_path: Path) -> None:
    place = tmp_path / "it's here"
    (place / "my net.txt").write_text("new")
    (place / "mine.py").write_text(NET)
    (place / ".gitignore").write_text("data\n")
    (place / "data").write_text("large")
    subprocess.run(["git", "init", "-q"], cwd=place, check=True)
    with contextlib.chdir(place):
        brought = Path.home() / PLACE / bundle("a")[1]
    own = ["model._target_=mine.Net", "+model.features=64", "+model.outputs=10", "trust=[mine]"]
    ssh = [*words, "launcher.sync=true"]
    try:
        done = commands.run(*SMALL[1:], *own, "steps=3", *ssh, f"out={tmp_path}/a", cwd=place, timeout=200)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"built in {brought}/mine.py") == 4, done.stdout
        assert {path.name for path in brought.iterdir()} - {"__pycache__"} == {".gitignore", "mine.py", "my net.txt"}
    finally:
        shutil.rmtree(brought, ignore_errors=True)


def test_a_folder_of_no_repository_cannot_be_brought(tmp_path: Path) -> None:
    words = ["launcher=ssh", "launcher.hosts=[a,b]", "launcher.sync=true", "out=a"]
    done = commands.run(*SMALL, "steps=2", *words, cwd=tmp_path)
    assert done.returncode == 3 and "this folder is in no repository of it. Type git init" in done.stderr, done.stderr
    done = commands.run(*SMALL, "steps=2", *words, "launcher.folder=/x", cwd=tmp_path)
    assert done.returncode == 2 and "launcher.sync=true brings it. Leave one out" in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.campaign("kills")
def test_a_host_whose_connection_breaks_is_started_again(words: list[str], tmp_path: Path) -> None:
    place = tmp_path / "it's here"
    command = Forked(
        [*COMMAND, *SMALL, "steps=4000", "checkpoint.every=50", *words, "out=a"], cwd=place, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 200
    while not any((place / "a" / "checkpoints").rglob("COMMIT.json")):
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.1)
    connections = [pid for pid in descendants(command.pid) if Path(f"/proc/{pid}/comm").read_text() == "ssh\n"]
    os.kill(connections[0], signal.SIGKILL)
    assert command.wait(200) == 0
    events = [json.loads(line) for line in (place / "a" / "events.jsonl").read_text().splitlines()]
    assert any(event["event"] == "resumed" or event.get("step") for event in events if event["event"] == "started")


@pytest.mark.parametrize(
    ("host", "parts"),
    [
        ("a", ("a", None)),
        ("me@gpu-3.site:2222", ("me@gpu-3.site", "2222")),
        ("root@[fe80::1]:22", ("root@[fe80::1]", "22")),
    ],
)
def test_hosts_are_names_with_a_user_and_a_port(host: str, parts: tuple[str, str | None]) -> None:
    match = HOST.fullmatch(host)
    assert match and (match["name"], match["port"]) == parts


def test_options_that_no_shell_could_read_are_refused() -> None:
    with pytest.raises(WordsError, match=r"launcher.options=.*No closing quotation. Quote it as in a shell"):
        Ssh(
            hosts=["a"], hostfile=None, folder=None, sync=False, python="python3", options="-i 'a", restarts=0,
            silence=1.0, wait=1.0, address=None,
        )  # fmt: skip


@pytest.mark.parametrize("host", ["-oProxyCommand=touch x", "a b", "a;touch x", "$(touch x)", "a\nb", "", "a:b"])
def test_what_is_no_host_is_refused(host: str, tmp_path: Path) -> None:
    done = commands.run(*SMALL, "launcher=ssh", f"launcher.hosts=['{host}',b]", "out=a", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "x").exists()


def test_a_hostfile_without_a_host_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# none\n")
    done = commands.run(*SMALL, "launcher=ssh", "launcher.hostfile=hosts", "out=a", cwd=tmp_path)
    assert done.returncode == 2 and "nodes=2, but launcher.hostfile=hosts has 0." in done.stderr, done.stderr


def test_a_plan_for_more_nodes_than_hosts_is_refused(tmp_path: Path) -> None:
    done = commands.run("plan", *SMALL, "launcher=ssh", "launcher.hosts=[a]", "out=a", cwd=tmp_path)
    assert done.returncode == 2
    assert "nodes=2, but launcher.hosts has 1. Name a host for each node, or type nodes=1." in done.stderr
