"""The verdict on what ranks found when they met, and the plan with which they do."""

from typing import Any

import pytest
from small import plan

from dtrain.doctor import Case, ranks
from dtrain.errors import RankError

ROW = {
    "axis": "world",
    "ranks": 2,
    "backend": "gloo",
    "operation": "all_reduce",
    "bytes": 1 << 20,
    "seconds": 0.001,
    "busbw": 1e9,
    "right": True,
}
RANK = {
    "rank": 0,
    "host": "a",
    "node": 0,
    "device": "cpu",
    "clock": 100.0,
    "versions": {"dtrain": "1", "torch": "2.13", "numpy": "2.0"},
}


@pytest.mark.parametrize(
    ("changed", "verdict", "message"),
    [
        ({}, "ok", "2 met, on a, b"),
        ({"versions": {**RANK["versions"], "torch": "2.12"}}, "stop", "torch is 2.13 on a, 2.12 on b"),  # type: ignore[dict-item]
        ({"versions": {**RANK["versions"], "numpy": "1.26"}}, "note", "numpy"),  # type: ignore[dict-item]
        ({"clock": 160.0}, "note", "60 s apart"),
    ],
)
def test_ranks_must_be_alike(changed: dict[str, Any], verdict: str, message: str) -> None:
    finding = ranks.alike([RANK, {**RANK, "rank": 1, "host": "b", **changed}])
    assert (finding.verdict, message in finding.text) == (verdict, True), finding


@pytest.mark.parametrize(
    ("changed", "verdict", "message"),
    [
        ({}, "ok", "1.00"),
        ({"busbw": 1e6}, "note", "gloo is slow"),
        ({"right": False}, "stop", "all_reduce over world by gloo gives wrong numbers"),
    ],
)
def test_bandwidth_is_judged(changed: dict[str, Any], verdict: str, message: str) -> None:
    small = {**ROW, "bytes": 4096, "seconds": 0.00025}
    finding = ranks.judged([small, {**ROW, **changed}])
    assert (finding.verdict, message in finding.text) == (verdict, True), finding
    assert "250 us" in finding.text


def test_ranks_that_cannot_meet_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RankError("rank 1 failed: RuntimeError: no route to host\nTraceback ...")

    monkeypatch.setattr("dtrain.launcher.local.Local.launch", fails)
    (finding,) = ranks.exchange(Case(plan("devices=2"), {}, dict))
    assert finding.verdict == "stop"
    assert finding.text == "2 rank(s) could not work together: rank 1 failed: RuntimeError: no route to host"


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        ({"kind": "killed", "signal": "SIGKILL"}, "dmesg | grep -i 'killed process' says whether memory ran out"),
        ({"kind": "memory"}, "dmesg | grep -i 'killed process' says whether memory ran out"),
        ({"kind": "killed", "signal": "SIGSEGV"}, "try devices=2, then nodes=2"),
        ({}, "try devices=2, then nodes=2"),
    ],
)
def test_ranks_that_were_killed_have_advice_about_memory(
    facts: dict[str, Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        error = RankError("rank 1 was killed")
        error.facts = facts
        raise error

    monkeypatch.setattr("dtrain.launcher.local.Local.launch", fails)
    (finding,) = ranks.exchange(Case(plan("devices=2"), {}, dict))
    assert finding.advice.startswith(advice)


def test_one_rank_and_a_torch_that_cannot_be_loaded_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain.launcher.local.Local.launch", lambda *_: pytest.fail("started"))
    (finding,) = ranks.exchange(Case(plan(), {}, dict))
    assert finding.verdict == "ok"
    assert list(ranks.exchange(Case(plan("devices=2"), {}, lambda: {"error": "no"}))) == []


def test_what_is_started_waits_no_longer_than_a_person() -> None:
    made = ranks.measuring(plan("nodes=2", "devices=2", "strategy=ddp"))
    assert made.loop == "dtrain.doctor.bandwidth.measure"
    assert (made.launcher["restarts"], made.backend["timeout"], made.others) == (0, 60.0, ())
