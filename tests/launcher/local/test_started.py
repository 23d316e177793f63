"""The agents of an engine: started at once, again when they have ended, and not for ever; their secret stays in the environment."""

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from launching import plan_of

from dtrain.launcher.children import Children
from dtrain.launcher.local.restarts import RestartLog
from dtrain.launcher.local.started import StartedAgents, unstarted
from dtrain.planned import Plan
from dtrain.result import Result


class Noting:
    """An engine of which a test decides what lives."""

    def __init__(self) -> None:
        self.started, self.living = list[list[int]](), set[int]()
        self.environment: Mapping[str, str] = {}
        self.command: Sequence[str] = ()

    def describe(self, plan: Plan) -> str:
        raise NotImplementedError

    def launch(self, plan: Plan) -> Result:
        raise NotImplementedError

    def start(self, nodes: Sequence[int], command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.started.append([*nodes])
        self.living.update(nodes)
        self.command, self.environment = command, environment

    def alive(self) -> Collection[int]:
        return self.living

    def stop(self) -> None:
        self.living.clear()


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of(tmp_path / "run", "nodes=3", "batch=12")


def agents(engine: Noting, plan: Plan, scratch: Path, **more: Any) -> StartedAgents:
    request = {"here": 0, "address": "10.0.0.1:20001", "wait": 60.0, "restarts": 2, **more}
    return StartedAgents(engine, plan, scratch, request)


def test_each_node_is_started_once_and_again_when_it_has_ended(plan: Plan, tmp_path: Path) -> None:
    engine = Noting()
    with agents(engine, plan, tmp_path) as started:
        started.tend()
        started.tend()
        engine.living.discard(1)
        started.tend()
        assert engine.started == [[0, 1, 2], [1]]
        assert list(engine.command[1:]) == ["-m", "dtrain.launcher.local.agent", "10.0.0.1:20001", "60"]
    assert not engine.living


def test_nodes_that_are_forked_here_are_not_started(plan: Plan, tmp_path: Path) -> None:
    engine = Noting()
    with agents(engine, plan, tmp_path, here=1) as started:
        started.tend()
    assert engine.started == [[1, 2]]


def test_what_ends_again_and_again_is_given_up_until_there_is_a_new_round(plan: Plan, tmp_path: Path) -> None:
    engine = Noting()
    with agents(engine, plan, tmp_path) as started:
        for _ in range(5):
            started.tend()
            engine.living.discard(2)
        started.tend()
        assert engine.started == [[0, 1, 2], [2], [2]]
        assert unstarted(tmp_path).read_text() == "the agent of node(s) 2 was started 3 times and ended"
        RestartLog(round=0).write(tmp_path)
        started.tend()
        assert engine.started[-1] == [2]


def test_a_run_that_is_over_starts_none(plan: Plan, tmp_path: Path) -> None:
    engine = Noting()
    (tmp_path / "over.json").write_text("{}")
    with agents(engine, plan, tmp_path) as started:
        started.tend()
    assert engine.started == []


@pytest.mark.parametrize("own", ["", "a secret of the user's own"])
def test_the_secret_is_the_users_or_a_new_one_for_each_launch(
    own: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_SECRET", own) if own else monkeypatch.delenv("DTRAIN_SECRET", raising=False)
    made = list[str]()
    for _ in range(2):
        with agents(engine := Noting(), plan, tmp_path) as started:
            started.tend()
            made.append(engine.environment["DTRAIN_SECRET"])
            assert made[-1] == os.environ["DTRAIN_SECRET"]
            assert made[-1] not in " ".join(engine.command)
    assert os.environ.get("DTRAIN_SECRET", "") == own
    assert made == [own, own] if own else len(set(made)) == 2 and min(map(len, made)) >= 32


def test_children_live_until_they_are_stopped_with_their_own_children(tmp_path: Path) -> None:
    children = Children()
    code = "import os, subprocess, sys; open(sys.argv[1], 'w').write(sys.stdin.read() + os.environ['A'])\nsubprocess.run(['sleep', '300'])"
    note = tmp_path / "note"
    children.start([0, 1], [sys.executable, "-c", code, str(note)], {"A": "env"}, stdin=b"in ")
    children.start([2], ["true"], {})
    deadline = time.monotonic() + 60
    while (2 in children.alive() or not note.exists() or not note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert children.alive() == {0, 1}
    assert note.read_text() == "in env"
    children.stop()
    assert children.alive() == set()
