"""Two nodes in two network namespaces, and the cable between them: cut for a while, and cut for good. Never two writers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import COMMAND
from launching import WORDS, steps_of, wait_for_step
from until import until

pytestmark = pytest.mark.campaign("network")

SLOW = [
    *WORDS,
    "model._target_=launching.Slow",
    "model.rank=0",
    "model.seconds=0.05",
    "batch=8",
    "checkpoint.every=5",
    "launcher=local",
]


@dataclass
class Cable:
    """`near` and `far` are the namespaces of the two hosts."""

    near: str
    far: str
    address: str

    def put(self, state: str) -> None:
        subprocess.run(["ip", "-n", self.far, "link", "set", "cable", state], check=True)

    def start(self, where: str, *words: str, scratch: Path) -> "subprocess.Popen[str]":
        scratch.mkdir(exist_ok=True)
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "TMPDIR": str(scratch),
            "DTRAIN_SECRET": "0123456789abcdef",
        }
        inside = ["ip", "netns", "exec", where, *words]
        return subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


@pytest.fixture
def cable() -> Iterator[Cable]:
    names = [f"dtrain-{end}-{os.getpid()}" for end in ("near", "far")]
    if os.getuid() or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces need root, and a kernel that has them")
    try:
        subprocess.run(["ip", "netns", "add", names[1]], check=True)
        subprocess.run(
            ["ip", "-n", names[0], "link", "add", "cable", "type", "veth", "peer", "cable", "netns", names[1]],
            check=True,
        )
        for number, name in enumerate(names, start=1):
            subprocess.run(["ip", "-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable"], check=True)
            for device in ("lo", "cable"):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
        yield Cable(*names, "10.77.0.1:29400")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def begun(cable: Cable, out: Path, *words: str) -> Iterator[tuple["subprocess.Popen[str]", "subprocess.Popen[str]"]]:
    """The command on one host and the agent of the other, some steps after their start; killed at the end of the context."""
    run = [*SLOW, *words, f"out={out}", f"launcher.address={cable.address}", "launcher.here=1"]
    near = cable.start(cable.near, *COMMAND, *run, scratch=out.with_name("near"))
    far = cable.start(
        cable.far, sys.executable, "-m", "dtrain.launcher.local.agent", cable.address, scratch=out.with_name("far")
    )
    try:
        wait_for_step(out, 5)
        yield near, far
    finally:
        for process in (near, far):
            if process.poll() is None:
                process.kill()
            print(process.communicate()[0])  # shown when the test has failed


def starts(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines() if '"started"' in line]


def ranks_of(agent: int) -> list[str]:
    try:
        return Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    except FileNotFoundError:
        return []


@pytest.mark.slow
def test_a_cut_of_ten_seconds_is_lived_through(cable: Cable, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with begun(cable, out, "nodes=2", "steps=120") as (near, far):
        cable.put("down")
        before = len(steps_of(out))
        time.sleep(10)
        assert len(steps_of(out)) <= before + 1
        cable.put("up")
        assert (near.wait(300), far.wait(120)) == (0, 0)
    assert len(starts(out)) == 1
    assert steps_of(out) == list(range(1, 121))


def test_cut_for_good_the_run_ends_and_names_the_node(cable: Cable, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with begun(cable, out, "nodes=2", "steps=20000", "launcher.silence=6", "launcher.wait=4") as (near, _):
        cable.put("down")
        assert near.wait(300) == 1
    failed = json.loads((out / "failure.json").read_text())
    assert "node 1" in failed["message"] and "was lost" in failed["message"]


@pytest.mark.slow
def test_cut_for_good_the_side_that_can_go_on_does_and_the_other_has_ended_before(cable: Cable, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with begun(cable, out, "nodes=1:2", "steps=100", "launcher.silence=3") as (near, far):
        cable.put("down")
        until(lambda: not ranks_of(far.pid))
        gone = time.time()
        assert near.wait(300) == 0
    assert [event["ranks"] for event in starts(out)] == [2, 1]
    assert gone < starts(out)[1]["time"]
    assert steps_of(out) == list(range(1, 101))
