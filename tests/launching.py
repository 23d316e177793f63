"""Models that fail on purpose, plans of them, and the command as a user runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from commands import COMMAND, Forked
from torch import Tensor, nn

from dtrain.build import build
from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.result import Result

WORDS = [
    "data=synthetic",
    "data.samples=512",
    "objective=regression",
    "steps=12",
    "log.every=1",
    "trust=[launching]",
    "logger=[]",
]


class Raises(nn.Module):
    """Raises ValueError on one rank in its `at`-th forward."""

    def __init__(self, rank: int, at: int = 4) -> None:
        super().__init__()
        self.layer, self.rank, self.at, self.calls = nn.Linear(64, 10), rank, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at and int(os.environ.get("RANK", 0)) == self.rank:
            self.fail()
        return self.layer(x)

    def fail(self) -> None:
        raise ValueError("planned")


class Killed(Raises):
    """Ends by SIGKILL instead, in the first attempt only."""

    def fail(self) -> None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)


class KilledAlways(Raises):
    """Ends by SIGKILL in every attempt."""

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Fills(Raises):
    """Fills the folder for temporary files first; `always`: in every attempt, else in the first only."""

    def __init__(self, rank: int, always: bool, at: int = 4) -> None:
        super().__init__(rank, at)
        self.always = always

    def fail(self) -> None:
        if self.always or os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            with suppress(OSError), Path(tempfile.gettempdir(), "filler").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 10))
            raise ValueError("planned")


class Slow(Raises):
    def __init__(self, rank: int, seconds: float = 0.05) -> None:
        super().__init__(rank)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.layer(x)


def meets(plan: Plan) -> Result:
    """A loop of which each rank writes at which addresses it listens, once it has met the others."""
    inherited = _held()  # of a process that tests something else too
    with build(plan.backend).open():
        ours = _held() - inherited
        rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        ends = {
            row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in ours
        }  # 0A: it listens
        place = Path(plan.out).with_name(f"listens-{os.environ['RANK']}")
        place.write_text(" ".join(socket.inet_ntoa(int(end, 16).to_bytes(4, sys.byteorder)) for end in ends))
        dist.barrier()
    return Result("finished", 0, None, 0.0, {}, {})


def shows(plan: Plan) -> Result:
    """A loop of which each rank writes which GPUs it was shown."""
    Path(plan.out).with_name(f"shown-{os.environ['RANK']}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    return Result("finished", 0, None, 0.0, {}, {})


def _held() -> set[str]:
    """What the descriptors of this process are."""
    return {str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def plan_of(out: Path, *words: str) -> Plan:
    return resolve(compose(["model=mlp", *WORDS, f"out={out}", *words]), Cluster(gpus=0, cpus=1))


def started(out: Path, *words: str, by: Sequence[str] = ()) -> subprocess.Popen[str]:
    """The command, forked from this process (or `by` instead of it), in the background, with the tests' modules at hand."""
    scratch = out.with_name(f"{out.name}-scratch")  # in the command line of every process of this run, and of no other
    scratch.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(scratch)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
    asked = [*WORDS, f"out={out}", *words]
    return subprocess.Popen([*by, *asked], **pipes) if by else Forked([*COMMAND, *asked], **pipes)


def wait_for_step(out: Path, step: int, seconds: float = 300) -> None:
    journal, deadline = out / "metrics.jsonl", time.monotonic() + seconds
    while not (journal.exists() and journal.read_text().count("\n") >= step):
        assert time.monotonic() < deadline, f"no step {step} within {seconds} s"
        time.sleep(0.02)


def steps_of(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def mentioning(text: str) -> list[str]:
    """Command lines of living processes that hold `text`: what a run left behind."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def threads(plan: Plan) -> Result:
    """A loop that only looks at the threads of its rank."""
    return Result("finished", torch.get_num_threads(), None, 0.0)


def nothing(plan: Plan) -> None:
    """A loop that forgets its result."""
