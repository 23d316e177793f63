"""Rounds: what is killed is replaced and the run goes on; what would fail again is not tried again."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from killing import below, leavings, over, served
from launching import plan_of, steps_of, wait_for_step
from until import until

from dtrain.cluster import network
from dtrain.errors import RankError
from dtrain.launcher import process
from dtrain.launcher.local.restarts import RestartLog
from dtrain.lifecycle import failure

SLOW = (
    "model._target_=launching.Slow",
    "model.rank=0",
    "model.seconds=0.02",
    "steps=100",
    "nodes=2",
    "batch=8",
    "checkpoint.every=4",
    "checkpoint.mode=blocking",
)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untouched")
    with served(plan_of(out / "run", *SLOW), out) as server:
        assert over(server, out)["error"] is None
    return out / "run"


def lives(pid: int) -> bool:
    """One whose parent was killed may be waiting for init to take note of its end."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return ") Z " not in stat.read_text()
    except OSError:
        return False


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("target", ["rank", "agent", "store"])
def test_a_run_goes_on_whatever_is_killed(target: str, untouched: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with served(plan_of(out, *SLOW), tmp_path) as server:
        wait_for_step(out, 10)
        before = {pid for pids in below(server).values() for pid in pids}
        os.kill(below(server)[target][-1], signal.SIGKILL)
        assert over(server, tmp_path)["error"] is None
        memory = process.memory(tmp_path)
        assert {path.name for path in memory.iterdir()} == {"command", "lock", "node-0", "node-1"}
        assert not any(lives(pid) for pid in before)
    assert steps_of(out) == list(range(1, 101))
    assert leavings(out) == leavings(untouched)
    started = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines() if '"started"' in line]
    first, second = (event["step"] for event in started)
    assert first == 0
    assert second >= 8


@pytest.mark.often("True")
@pytest.mark.campaign("kills")
@pytest.mark.parametrize("noted", [False, True])
def test_a_server_killed_as_it_begins_a_round_is_followed_by_the_next(
    noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, plan = RestartLog.write, plan_of(tmp_path / "run", *SLOW, "steps=4", "nodes=1", "launcher=local")

    def dies(book: RestartLog, scratch: Path) -> None:
        if noted:
            write(book, scratch)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(RestartLog, "write", dies)
        with served(plan, tmp_path) as server:
            until(lambda: process.ended(server) is not None)
    with served(plan, tmp_path) as server:
        assert over(server, tmp_path)["error"] is None


def test_an_error_that_comes_before_any_new_step_is_not_tried_again(tmp_path: Path) -> None:
    with served(
        plan_of(tmp_path / "run", "model._target_=launching.Raises", "model.rank=1", "model.at=1", "nodes=2"), tmp_path
    ) as server:
        assert over(server, tmp_path)["round"] == 0
    with pytest.raises(RankError, match=r"rank 1 failed.*ValueError: planned"):
        failure.outcome(tmp_path / "round-0")


@pytest.mark.campaign("kills")
def test_what_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with served(plan_of(out, *SLOW, "checkpoint.every=0"), tmp_path, restarts=1) as server:
        for number in range(2):
            until((tmp_path / f"round-{number}" / "began-1.json").exists)
            os.kill(below(server)["rank"][0], signal.SIGKILL)
        assert over(server, tmp_path)["round"] == 1
    with pytest.raises(RankError, match=r"rank [01] was killed"):
        failure.outcome(tmp_path / "round-1")


def test_a_wish_between_two_rounds_begins_no_new_one(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with served(plan_of(out, *SLOW, "nodes=1", "launcher=local"), tmp_path, here=1, address="127.0.0.1:0") as server:
        wait_for_step(out, 5)
        os.kill(below(server)["agent"][0], signal.SIGSTOP)  # it ends no rank now
        for rank in below(server)["rank"]:
            os.kill(rank, signal.SIGKILL)
        os.kill(server, signal.SIGTERM)
        os.kill(below(server)["agent"][0], signal.SIGCONT)
        assert over(server, tmp_path) == {"round": 0, "error": None, "stopped_by": signal.SIGTERM}


@pytest.mark.campaign("network")
def test_a_node_that_never_comes_is_named(tmp_path: Path) -> None:
    with served(plan_of(tmp_path / "run", *SLOW), tmp_path, here=1, address="127.0.0.1:0", wait=6.0) as server:
        assert "1 of 2 nodes came within 6 s, node 1 did not" in over(server, tmp_path)["error"]
    assert not (tmp_path / "round-0").exists()


@pytest.mark.skipif(not network.interfaces(), reason="only Linux tells the addresses of its interfaces")
@pytest.mark.parametrize("address", sorted(network.interfaces().values()))
def test_ranks_of_the_server_s_own_host_listen_where_the_others_were_told(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where the host's name leads: on many hosts that is 127.0.1.1, which no other reaches."""
    monkeypatch.setenv("DTRAIN_SECRET", "0123456789abcdef")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    plan = plan_of(tmp_path / "run", "nodes=2", "batch=8", "launcher=local").with_loop("launching.meets")
    with served(plan, tmp_path, address=f"{address}:0") as server:
        assert over(server, tmp_path)["error"] is None
    assert [(tmp_path / f"listens-{rank}").read_text() for rank in range(2)] == [address] * 2


@pytest.mark.parametrize(
    ("shown", "nodes", "each"),
    [(None, 2, ["0,1", "2,3"]), ("4,GPU-5f1c,6,7", 2, ["4,GPU-5f1c", "6,7"]), ("4,5", 1, ["4,5"]), (None, 1, ["all"])],
)
def test_nodes_of_one_host_have_gpus_of_their_own(
    shown: str | None, nodes: int, each: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the first rank of each would be on the first GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    plan = plan_of(tmp_path / "run", f"nodes={nodes}", "devices=2", "batch=8", "launcher=local").with_loop(
        "launching.shows"
    )
    with served(replace(plan, device="cuda"), tmp_path) as server:
        assert over(server, tmp_path)["error"] is None
    assert [(tmp_path / f"shown-{rank}").read_text() for rank in range(2 * nodes)] == [
        own for own in each for _ in range(2)
    ]
