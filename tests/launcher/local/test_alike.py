"""A node that is not like the server's host, or cannot run the plan, is refused by name, with the difference and what to do."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from killing import over, served
from launching import free_port, plan_of

from dtrain.launcher import preflight, process
from dtrain.launcher.local import agent, alike
from dtrain.planned import Plan


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of(tmp_path / "run", "nodes=2", "batch=8", "trust=[launching,numpy]")


def test_the_same_host_does_not_differ(plan: Plan) -> None:
    same = alike.facts(plan)
    assert not [*alike.of_host(same)]
    assert not [*alike.of_plan(same, plan)]
    assert same["packages"]["numpy"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"python": "3.9"}, f"Python is {sys.version_info[0]}.{sys.version_info[1]} here and 3.9 on far. Use the same"),
        ({"packages": {"torch": "1.0"}}, "and 1.0 on far. Type pip install torch==1.0, here."),
        ({"packages": {"nosuch": "2"}}, "nosuch is not installed here and 2 on far. Type pip install nosuch==2, here."),
        ({"packages": {"numpy": ""}}, "and a folder on far. Type pip uninstall numpy, here."),
        ({"code": "abc"}, "this folder is at commit 0123, and at abc on far. Check out the same commit."),
        ({"source": "abc"}, "the source of dtrain here differs from that on far. Install the same one."),
        ({"clock": 1e9}, "s apart. Type timedatectl set-ntp true, on both."),
    ],
)
def test_each_difference_is_one_sentence(
    change: dict[str, Any], said: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_CODE", "0123")
    (problem,) = alike.of_host({**alike.facts(plan), "host": "far", **change})
    assert said in problem


def test_another_folder_of_the_same_name_is_not_where_the_run_is(plan: Plan) -> None:
    (Path(plan.out)).mkdir()
    (Path(plan.out) / "plan.yaml").write_text("here")
    same = {**alike.facts(plan), "host": "far"}
    (Path(plan.out) / "plan.yaml").unlink()
    (problem,) = alike.of_plan(same, plan)
    assert f"out={plan.out} is another folder here than on far" in problem
    (problem,) = alike.of_plan({**same, "out": "", "digest": "0" * 12}, plan)
    assert "digest" in problem and "Install the same one" in problem


def test_what_a_node_lacks_is_seen_there(plan: Plan, tmp_path: Path) -> None:
    assert preflight.on_node(plan) == []
    far = plan_of(tmp_path / "far", "nodes=2", "batch=8", "trust=[nosuch]")
    (problem,) = preflight.on_node(far)
    assert "trust=[nosuch]: there is no such package" in problem


def test_the_run_ends_with_the_sentences_of_the_nodes_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    plan = plan_of(tmp_path / "run", "nodes=2", "batch=8", "launcher=local")

    def differs() -> None:
        alike._python = lambda: "2.7"
        agent.join(address, 60)

    with served(plan, tmp_path, address=address, here=1, wait=100) as server:
        far = process.fork(differs, "dtrain-agent-far")
        last = over(server, tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(far, 0)[1]) != 0
    assert last["exit_code"] == 3
    assert last["error"].startswith(f"{socket.gethostname()}: Python is 2.7 here and 3.")
