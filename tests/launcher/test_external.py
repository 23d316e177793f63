"""Ranks that torchrun started."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import commands
import pytest
from launching import WORDS, started, steps_of, wait_for_step

from dtrain.launcher import external
from dtrain.launcher.external import External, launcher_of
from dtrain.storage import lease

SLOW = ["model._target_=launching.Slow", "model.rank=0", "batch=8", "steps=20000", "checkpoint.every=2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
DIRECTLY = ["-m", "dtrain"]
IN_A_SHELL = ["--no-python", "bash", "-c", f'{sys.executable} -m dtrain "$@"; exit $?', "ranks"]


def torchrun(*words: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dtrain", *WORDS, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)


@pytest.mark.campaign("network")
def test_the_ranks_that_are_there_are_used(tmp_path: Path) -> None:
    done = torchrun("model=mlp", f"out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "external (auto: RANK and WORLD_SIZE are set)" in done.stdout
    assert steps_of(tmp_path) == list(range(1, 13))


def test_wrong_words_are_told_once(tmp_path: Path) -> None:
    """By one of the ranks, which begin as torchrun begins them."""
    words = [*WORDS, "model=mlp", f"out={tmp_path}", "launcher=external", "devices=3"]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    of_ranks = [{"RANK": rank, "LOCAL_RANK": rank, **place} for rank in "01"]
    done = [commands.run(*words, env={**environment(), **variables}) for variables in of_ranks]
    assert all(rank.returncode for rank in done)
    assert "".join(rank.stderr for rank in done).count("started as one of 2 ranks") == 1


@pytest.mark.parametrize(("rank", "own"), [("0", "0"), ("1", "1"), ("2", "0"), ("5", "1")])
def test_a_launcher_that_gives_no_local_rank_fills_one_host_after_the_other(
    rank: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*external.SUPERVISED, "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(external, "run_here", lambda plan, launcher: os.environ["LOCAL_RANK"])
    assert External().launch(cast(Any, SimpleNamespace(devices=2))) == own


def test_without_ranks_it_is_refused() -> None:
    done = commands.run("launcher=external")
    assert done.returncode == 2
    assert "torchrun" in done.stderr


@contextmanager
def training(out: Path, *words: str, by: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """Ranks in the midst of a run, whose launcher is the process; none is left behind by the test."""
    launcher = started(out, *SLOW, *words, by=[*TORCHRUN, *by])
    try:
        wait_for_step(out, 5)
        yield launcher
    finally:
        launcher.kill()
        for pid in ranks_of(out):
            os.kill(pid, signal.SIGKILL)
        launcher.wait()
        assert launcher.stdout
        launcher.stdout.close()


def ranks_of(out: Path) -> list[int]:
    """Processes of dtrain that write under `out`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode().split("\0")
        except OSError:
            continue
        if f"out={out}" in words and "dtrain" in words and "torch.distributed.run" not in words and "-c" not in words:
            found.append(int(entry.parent.name))
    return found


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("ranks", [DIRECTLY, IN_A_SHELL], ids=["directly", "in_a_shell"])
def test_ranks_do_not_outlive_a_killed_launcher_and_the_lease_is_free(ranks: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with training(out, by=["--standalone", "--nproc-per-node=2", *ranks]) as torchrun:
        assert len(ranks_of(out)) == 2
        torchrun.kill()
        assert all_gone(out, 120)
        output = torchrun.communicate()[0]
    assert output.count("dtrain: the launcher of the ranks (pid ") == 1, output
    assert "Traceback" not in output
    assert json.loads((out / "failure.json").read_text())["error"].startswith("the launcher of the ranks")
    assert lease.holder(str(out))[0] in ("free", "left")
    again = commands.run(*WORDS, *SLOW, f"out={out}", "stop_after=1", env=environment())
    assert again.returncode == 0, again.stderr
    assert "watching for" not in again.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def all_gone(out: Path, seconds: float) -> bool:
    """Whether no rank lives by then; what waits to be collected by a launcher that was stopped has ended."""
    deadline = time.monotonic() + seconds
    while ranks_of(out) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not ranks_of(out)


@pytest.mark.campaign("signals")
def test_a_stopped_launcher_that_holds_the_store_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with training(
        out, "backend=gloo", "backend.timeout=10", by=["--standalone", "--nproc-per-node=2", *DIRECTLY]
    ) as torchrun:
        torchrun.send_signal(signal.SIGSTOP)
        assert all_gone(out, 120)
        assert "the store process at " in json.loads((out / "failure.json").read_text())["error"]
    assert lease.holder(str(out))[0] in ("free", "left")


def test_a_rank_that_a_shell_left_in_the_background_goes_on() -> None:
    assert launcher_of(os.getppid(), {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert launcher_of(os.getpid(), {"SLURM_STEP_ID": "0"}) == os.getpid()


@pytest.mark.slow
def test_when_the_first_of_two_launchers_is_killed_the_ranks_of_both_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    nodes = [
        [
            "--nnodes=2",
            f"--node-rank={node}",
            "--master-addr=127.0.0.1",
            "--master-port=29731",
            "--nproc-per-node=1",
            *DIRECTLY,
        ]
        for node in (0, 1)
    ]
    second = started(out, *SLOW, by=[*TORCHRUN, *nodes[1]])
    with training(out, by=nodes[0]) as first:
        first.kill()
        output, _ = second.communicate(timeout=300)
        assert all_gone(out, 120)
    assert second.returncode not in (0, -signal.SIGKILL), output
    assert lease.holder(str(out))[0] in ("free", "left")
