"""A node of another host: it joins, it is lost, it comes back; and its ranks do not outlive its link to the server."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from killing import below, over, served
from launching import free_port, plan_of, steps_of, wait_for_step
from until import until

from dtrain.launcher import process
from dtrain.launcher.local.agent import Agent, join
from dtrain.lifecycle import signals

WORDS = (
    "model._target_=launching.Slow",
    "model.rank=0",
    "model.seconds=0.02",
    "batch=8",
    "checkpoint.every=5",
    "launcher=local",
)


def joined(address: str, wait: float = 120) -> int:
    """The agent of another host, forked from this process."""
    return process.fork(lambda: join(address, wait), "dtrain-agent-far")


def starts(out: Path) -> list[dict[str, int]]:
    path = out / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if '"started"' in line] if path.exists() else []


def wait_for_ranks(out: Path, number: int, rounds: int) -> None:
    deadline = time.monotonic() + 300
    while len(starts(out)) < rounds or starts(out)[-1]["ranks"] != number:
        assert time.monotonic() < deadline, starts(out)
        time.sleep(0.02)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.campaign("kills")
def test_nodes_come_and_go_and_the_losses_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.launcher.local.rounds.LAST_CALL_SECONDS", 0.3)
    address, out = f"127.0.0.1:{free_port()}", tmp_path / "run"
    plan = plan_of(out, *WORDS, "nodes=1:2", "steps=400")
    assert (plan.allowed, plan.on(1).batch.size, plan.on(1).batch.microbatch) == ([1, 2], 8, 4)
    with served(plan, tmp_path, address=address, here=1) as server:
        agent = joined(address)
        wait_for_ranks(out, 2, 1)
        wait_for_step(out, 10)
        process.kill(agent)
        wait_for_ranks(out, 1, 2)
        wait_for_step(out, len(steps_of(out)) + 1)
        agent = joined(address)
        wait_for_ranks(out, 2, 3)
        grown = starts(out)[-1]["step"]
        assert over(server, tmp_path)["error"] is None
        assert os.waitpid(agent, 0)[1] == 0
    assert grown == starts(out)[-1]["step"] > starts(out)[-2]["step"]
    assert steps_of(out) == list(range(1, 401))
    alone = tmp_path / "alone"
    (alone / "scratch").mkdir(parents=True)
    with served(plan_of(alone / "run", *WORDS, "steps=400", "model.seconds=0.0"), alone / "scratch") as server:
        over(server, alone / "scratch")
    assert losses(out) == pytest.approx(losses(alone / "run"), abs=2e-6)


def test_a_node_too_many_is_turned_away(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with served(
        plan_of(tmp_path / "run", *WORDS, "nodes=2", "steps=1000"), tmp_path, address=address, here=2
    ) as server:
        until(lambda: below(server)["rank"], pause=0.02)
        with pytest.raises(TimeoutError, match="all 2 nodes of the run are there"):
            join(address, 0.1)


@pytest.mark.campaign("network")
def test_a_silent_server_ends_the_ranks(tmp_path: Path) -> None:
    """As when the cable is cut: the link stays open, and nothing comes through it. The server gives the node up only after that."""
    address, out = f"127.0.0.1:{free_port()}", tmp_path / "run"
    with served(
        plan_of(out, *WORDS, "nodes=2", "steps=20000"), tmp_path, address=address, here=1, silence=6.0
    ) as server:
        agent = joined(address)
        wait_for_step(out, 3)
        ranks = [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
        assert ranks
        os.kill(server, signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while Path(f"/proc/{ranks[0]}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill(agent)


def test_a_rank_counts_the_time_limit_from_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command began long before a node joined, or before ranks started again."""
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(process, "fork", lambda work, name: environments.append(work.args[-1]) or len(environments))
    plan = SimpleNamespace(world=1, devices=1)
    plan.on = lambda nodes: plan
    agent = Agent(
        cast(Any, plan), cast(Any, None), folder=tmp_path, memory=tmp_path, lease=None, shared=True, alone=True
    )
    before = time.monotonic()
    agent._start(round=0, first=0, nodes=1, group=0, passed=1e6, environment={})
    assert before - 1e6 <= float(environments[0]["DTRAIN_BEGAN"]) <= time.monotonic() - 1e6


@pytest.mark.often("1:2")
@pytest.mark.campaign("signals")
@pytest.mark.parametrize("nodes", ["1:2", "2"])
def test_a_node_that_is_told_to_go_loses_no_step(nodes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is left the run goes on where it was; without enough it ends as preempted, and has saved."""
    monkeypatch.setattr("dtrain.launcher.local.rounds.LAST_CALL_SECONDS", 0.3)
    address, out = f"127.0.0.1:{free_port()}", tmp_path / "run"
    plan = plan_of(out, *WORDS, f"nodes={nodes}", "steps=120", "checkpoint.every=0")
    with served(plan, tmp_path, address=address, here=1) as server:
        agent = process.fork(lambda: sys.exit(join(address, 120)), "dtrain-agent-far")
        wait_for_ranks(out, 2, 1)
        wait_for_step(out, 5)
        os.kill(agent, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1]) == 75
        last = over(server, tmp_path)
    result = json.loads((tmp_path / f"round-{last['round']}" / "result.json").read_text())
    assert (last["error"], result["status"]) == (None, "finished" if nodes == "1:2" else "preempted")
    steps = [start["step"] for start in starts(out)]
    assert steps_of(out) == list(range(1, result["step"] + 1))
    if nodes == "1:2":
        assert steps[0] == 0 and len(steps) == 2
        assert 5 <= steps[1] < 120, "it went on from the step in which it was told"
    else:
        assert 5 <= result["step"] < 120


def test_the_signal_of_an_agent_that_waits_for_its_server_ends_it(tmp_path: Path) -> None:
    agent = subprocess.Popen([sys.executable, "-m", "dtrain.launcher.local.agent", f"127.0.0.1:{free_port()}", "120"])
    time.sleep(1.0)
    agent.terminate()
    assert agent.wait(60) == -signal.SIGTERM


def test_ranks_that_ignore_sigint_are_asked_by_another_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "STOP_SIGNALS", (signal.SIGTERM, signal.SIGUSR1))
    rank = subprocess.Popen(["sleep", "60"])
    nothing = cast(Any, None)
    agent = Agent(nothing, nothing, folder=tmp_path, memory=tmp_path, lease=None, shared=True, alone=True)
    agent._ranks[rank.pid] = 0
    agent._stop(number=signal.SIGINT)
    assert rank.wait(10) == -signal.SIGUSR1
