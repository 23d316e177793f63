"""A machine on which a run cannot start: one sentence, exit code 3, within seconds, whatever is missing."""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from commands import COMMAND
from launching import WORDS
from pool import ranks
from small import plan

from dtrain.launcher import preflight
from dtrain.planned import Plan

SECONDS = 300
"""On a busy machine; alone it takes one or two."""
ROOT = Path(__file__).parents[1]
NAMESPACES = (
    os.getuid() == 0
    and bool(shutil.which("unshare"))
    and not subprocess.run(["unshare", "-nm", "true"], check=False, capture_output=True).returncode
)
own_namespace = pytest.mark.skipif(not NAMESPACES, reason="needs root and unshare")
CAPABILITY = "-all,+dac_read_search"
NOBODY = [
    "setpriv", "--reuid=65534", "--clear-groups", f"--inh-caps={CAPABILITY}", f"--ambient-caps={CAPABILITY}", f"--bounding-set={CAPABILITY}",
]  # fmt: skip
"""A command as a user who is not root, who may read all and write what its mode allows."""
another_user = pytest.mark.skipif(
    os.getuid() != 0
    or not shutil.which("setpriv")
    or bool(subprocess.run([*NOBODY, sys.executable, "-c", ""], check=False, capture_output=True).returncode),
    reason="needs root and setpriv",
)
LOCAL = ["model=mlp", "steps=2", "launcher=local", "devices=2"]


def refused(
    out: Path,
    *words: str,
    base: Sequence[str] = WORDS,
    by: list[str] | None = None,
    before: Callable[[], None] | None = None,
    **environ: str,
) -> str:
    """The one sentence of a command that cannot start."""
    done = subprocess.run(
        [*(by or []), *COMMAND, *base, *words, f"out={out}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False, preexec_fn=before,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert done.returncode == 3, done.stderr
    assert len(said) == 1, done.stderr
    assert said[0].startswith("dtrain: ")
    return said[0].removeprefix("dtrain: ")


def mounted(tmp_path: Path, place: str, options: str) -> list[str]:
    """A command run where `place` is a small disk that is full."""
    script = f'mount -t tmpfs -o {options} none {place} && {{ head -c 1M /dev/zero > {place}/rest; touch {place}/last; exec "$@"; }} 2>{tmp_path}/mount'
    return ["unshare", "-m", "bash", "-c", script.replace('exec "$@"', 'exec "$@" 2>&3'), "bash"]


def with_errors(by: list[str]) -> list[str]:
    return ["bash", "-c", 'exec "$@" 3>&2', "bash", *by]


@pytest.mark.campaign("network")
def test_an_address_that_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = refused(tmp_path, *LOCAL, "nodes=2", "launcher.here=1", f"launcher.address={address}", "batch=8")
    assert (
        said
        == f"the launcher cannot start: launcher.address={address}: address already in use. Type one of this host that is free"
    )


@pytest.mark.campaign("network")
@pytest.mark.parametrize("address", ["no-such-host.invalid:45672", "192.0.2.7:45672"])
def test_an_address_that_is_not_of_this_host(address: str, tmp_path: Path) -> None:
    said = refused(
        tmp_path,
        *LOCAL,
        "nodes=2",
        "launcher.here=1",
        f"launcher.address={address}",
        "batch=8",
        DTRAIN_SECRET="0123456789abcdef",
    )
    assert said.startswith(f"the launcher cannot start: launcher.address={address}: ")


@pytest.mark.campaign("network")
@pytest.mark.parametrize(("name", "value"), [("MASTER_ADDR", "no-such-host.invalid"), ("MASTER_PORT", "taken")])
def test_a_rank_whose_store_cannot_be(name: str, value: str, tmp_path: Path) -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = str(taken.getsockname()[1])
        rank = "1" if name == "MASTER_ADDR" else "0"
        variables = {
            "RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        said = refused(
            tmp_path, "model=mlp", "steps=2", **{**variables, **({name: value} if name == "MASTER_ADDR" else {})}
        )
    assert name in said


@pytest.mark.parametrize("words", [["model=mlp"], LOCAL], ids=["inline", "local"])
def test_too_few_open_files(words: list[str], tmp_path: Path) -> None:
    said = refused(tmp_path, *words, before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)))
    assert said.startswith("20 open files are allowed, and a rank of ")
    assert "ulimit -n" in said


@pytest.mark.campaign("network")
@own_namespace
@pytest.mark.parametrize("words", [["model=mlp"], LOCAL], ids=["inline", "local"])
def test_a_network_namespace_without_loopback(words: list[str], tmp_path: Path) -> None:
    said = refused(tmp_path, *words, by=["unshare", "-n"])
    assert said.startswith("127.0.0.1 cannot be reached: ")
    assert "ip link set lo up" in said


@own_namespace
@pytest.mark.parametrize("options", ["nr_inodes=3", "size=4k"])
def test_no_room_for_what_the_launcher_writes(options: str, tmp_path: Path) -> None:
    said = refused(tmp_path / "out", *LOCAL, by=with_errors(mounted(tmp_path, "/dev/shm", options)))
    assert said.startswith("there is no room for the launcher's files in /dev/shm: no space left on device")


def test_standard_output_on_a_full_disk(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *WORDS, *LOCAL, f"out={tmp_path}"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("dtrain: standard output: no space left on device")
    assert "Traceback" not in done.stderr


def test_a_verb_whose_answer_is_lost_says_so() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "plan"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS, check=False
        )
    assert (done.returncode, done.stderr.count("no space left on device")) == (3, 1)


def as_another_user(made: Plan) -> list[str]:
    """What is said of three processes to a user who is not root."""
    resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
    os.setuid(65534)
    return [*preflight.limits(made)]


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_too_few_processes() -> None:
    [[said]] = ranks(1, as_another_user, plan("model=mlp", "data=synthetic", "objective=regression", "devices=2"))
    assert re.match(r"\d more processes and threads are allowed, and the ranks here need about ", said)
    assert "ulimit -u" in said


@another_user
@pytest.mark.parametrize("words", [["model=mlp"], LOCAL], ids=["inline", "local"])
def test_a_run_with_too_few_processes(words: list[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    said = refused(tmp_path / "out", *words, by=[*NOBODY, "bash", "-c", 'ulimit -u 12; exec "$@"', "bash"])
    assert re.match(r"\d+ more processes and threads are allowed, and the ranks here need about ", said)


@another_user
@pytest.mark.parametrize("words", [["model=mlp"], LOCAL], ids=["inline", "local"])
def test_a_current_folder_that_may_not_be_written(words: list[str], tmp_path: Path) -> None:
    said = refused(Path("out"), *words, by=[*NOBODY, "bash", "-c", f'cd {tmp_path}; exec "$@"', "bash"])
    assert said.startswith("out=out: cannot write out/.probe-") and said.endswith(": Permission denied")


@another_user
@pytest.mark.parametrize("words", [[], ["launcher=local", "devices=2"]], ids=["inline", "local"])
def test_a_home_and_a_cache_that_may_not_be_written(words: list[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    home, text = tmp_path / "home", tmp_path / "text.txt"
    home.mkdir(mode=0o755)
    text.write_text("to be or not to be " * 200)
    base = [
        "model=gpt",
        "model.layers=1",
        "model.width=32",
        "data=text",
        f"data.path={text}",
        "data.sequence=16",
        "steps=2",
        "logger=[]",
        "batch=8",
    ]
    said = refused(
        tmp_path / "out", *words, base=base, by=NOBODY, HOME=str(home), XDG_CACHE_HOME="", TMPDIR=str(tmp_path)
    )
    assert said == f"cannot keep the encoded text in {home}/.cache/dtrain: Permission denied"
