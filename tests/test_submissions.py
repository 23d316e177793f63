"""A thousand submissions, of which CI makes 300, with strange words, hosts and folders: a script that runs what was meant, or a sentence."""

import contextlib
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.config.word import quote
from dtrain.errors import DtrainError
from dtrain.resolve import resolve

RUN = ("model=mlp", "data=synthetic", "objective=regression", "nodes=2", "steps=2")
HERE = Cluster(0, 8)
PAYLOADS = (
    "$(touch hit)", "`touch hit`", ";touch hit;", "\ntouch hit\n", "' ; touch hit; '", '"; touch hit; "', "&& touch hit", "| touch hit",
    "-oProxyCommand=touch hit", "--wrap=touch hit", "$HOME", "${IFS}", "%j", "\\", "\r", "\x00", "\x1b[2J", "~", "*", "é", "🙂", "a b", "",
    "../../x", "#SBATCH --wrap=touch hit", "=", ",", "[", "{a: 1}", "${oc.env:HOME}", "null", "1e309", "x" * 300,
)  # fmt: skip
WORDS = {
    "ssh": (
        "launcher.hosts",
        "launcher.hostfile",
        "launcher.folder",
        "launcher.python",
        "launcher.options",
        "launcher.address",
        "out",
    ),
    "slurm": (
        "launcher.partition",
        "launcher.account",
        "launcher.qos",
        "launcher.time",
        "launcher.more",
        "launcher.address",
        "out",
    ),
    "mpi": ("launcher.command", "launcher.address", "out"),
}
LISTS = ("launcher.hosts", "launcher.more")


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter that writes its folder and its arguments to the file `called`, and nothing else."""
    path = tmp_path / "it's a python"
    path.write_text(f'#!/bin/sh\nprintf \'%s\\0\' "$PWD" "$@" > {tmp_path}/called\n')
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def mutated(random: random.Random, word: str) -> str:
    text = random.choice(("a", "host", "me@host:22", "runs/a", "1:00", "--mem=1G", "mpirun -n 2"))
    at = random.randrange(len(text) + 1)
    text = random.choice((text, "", text[:at])) + random.choice(PAYLOADS) + random.choice((text[at:], ""))
    return f"{word}=[{quote(text)},b]" if word in LISTS else f"{word}={quote(text)}"


def submissions(seeds: range) -> Iterator[tuple[str, list[str], str]]:
    """The launcher, the words, and the name of the working folder."""
    for seed in seeds:
        chance = random.Random(seed)
        launcher = chance.choice([*WORDS])
        words = {"launcher.hosts": "launcher.hosts=[a,b]"} if launcher == "ssh" else {}
        words |= {word: mutated(chance, word) for word in chance.sample(WORDS[launcher], chance.choice((1, 1, 2)))}
        folder = re.sub("[/\0]", "", chance.choice(PAYLOADS))[:200] if chance.random() < 0.3 else ""
        yield launcher, [f"launcher={launcher}", *words.values()], folder or "plain"


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        yield


def called(place: Path) -> list[str] | None:
    """The folder and the arguments with which the interpreter was called since the last look."""
    path = place / "called"
    if not path.exists():
        return None
    parts = path.read_text().split("\0")[:-1]
    path.unlink()
    return parts


def run(place: Path, command: Sequence[str], script: str = "") -> list[str] | None:
    subprocess.run(command, input=script, text=True, capture_output=True, timeout=60, env={"PATH": os.environ["PATH"]})
    return called(place)


@pytest.mark.campaign("fuzz")
@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 1000), marks=pytest.mark.slow)], ids=str)
def test_what_is_submitted_runs_as_it_was_meant_or_is_refused(seeds: range, python: Path, tmp_path: Path) -> None:
    refused = ran = 0
    for launcher, words, folder in submissions(seeds):
        with inside(tmp_path / folder):
            try:
                plan = resolve(compose([*RUN, "out=runs/b", *words]), HERE)
                text = build(plan.launcher).describe(plan)
            except DtrainError as error:
                assert str(error) and "Traceback" not in str(error)
                refused += 1
                continue
            ran += 1
            here = str(Path.cwd())
            if launcher == "slurm":
                assert run(tmp_path, ["bash"], text) == [here, "-m", "dtrain", "run", plan.out], (words, text)
            if launcher == "ssh":
                for line in re.split(r"\n(?=ssh )", text):
                    *_, marker, host, remote = shlex.split(line)
                    assert marker == "--" and not host.startswith("-"), line
                    seen = run(tmp_path, ["sh", "-c", remote])
                    if plan.launcher["python"] == str(python) and not plan.launcher["folder"]:
                        assert seen == [here, "-m", "dtrain.launcher.local.agent", "<address>", "-"], line
    assert not [*tmp_path.rglob("hit")] and not (Path.home() / "hit").exists()
    assert refused > 100 and ran > 100
