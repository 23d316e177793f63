"""A process shows its title whole, however short the command line it was forked from, and what was typed no longer."""

import subprocess
import sys
from pathlib import Path

import pytest

LONG = "dtrain-server 12345 /tmp/" + "folder/" * 40
LINE = "import sys; exec(sys.stdin.read())"


@pytest.mark.skipif(sys.platform != "linux", reason="titles are shown on Linux")
@pytest.mark.parametrize("argument", ["", "logger.key=hidden" * 50])
def test_a_title_is_whole_in_itself_and_its_forks_and_nothing_typed_is_left(argument: str) -> None:
    code = f"""
import os
from pathlib import Path
from dtrain.launcher.title import retitle

environment = Path("/proc/self/environ").read_bytes()
for title in ("dtrain-zygote 1 /tmp", {LONG!r}, "dtrain-job", {LONG!r}):
    retitle(title)
    print(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode(), flush=True)
assert Path("/proc/self/environ").read_bytes() == environment
if not os.fork():
    print(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode(), flush=True)
    os._exit(0)
os.wait()
from dtrain.launcher import process
os.waitpid(process.fork(lambda: print(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode(), flush=True), "dtrain-rank-0"), 0)
"""
    done = subprocess.run(
        ["python", "-c", LINE, *filter(None, [argument])], executable=sys.executable, input=code, text=True, capture_output=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])}, timeout=60,
    )  # fmt: skip
    assert not done.stderr
    *lines, rank = done.stdout.splitlines()
    assert lines[-1] == LONG and rank == LONG.replace("dtrain-server", "dtrain-rank-0"), (
        "a fork with a name has its own"
    )
    assert sorted(lines) == sorted(["dtrain-zygote 1 /tmp", LONG, "dtrain-job", LONG, LONG])
