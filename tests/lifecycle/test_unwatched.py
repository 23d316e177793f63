"""Ranks without an agent: who times out asks the others of its host before it says who is to blame."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from until import until

from dtrain.errors import RankError
from dtrain.launcher import process
from dtrain.lifecycle import failure, unwatched


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[[int, Any], int]]:
    """Begin a process as a rank that does nothing, with this handler of SIGUSR2."""
    pids = list[int]()

    def begin(number: int, handler: Any) -> int:
        def wait() -> None:
            signal.signal(signal.SIGUSR2, handler)
            failure.mark_started(tmp_path, number)
            time.sleep(600)

        pids.append(process.fork(wait))
        until((tmp_path / f"began-{number}.json").exists)
        return pids[-1]

    yield begin
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _late(folder: Path) -> None:
    failure.mark_started(folder, 0)
    error = "Timed out waiting 1000ms for recv operation"
    failure.report_detected(
        folder, 0, "timeout", error, collective="all_reduce (a.py:1 in step)", groups={"the world": 7}
    )


def test_a_rank_that_answers_is_behind(rank: Callable[[int, Any], int], tmp_path: Path) -> None:
    def answer(*_: object) -> None:
        (tmp_path / "report-1.json").write_text('{"where": "mine.py:5 in wait", "groups": {"the world": 6}}')

    rank(1, answer)
    _late(tmp_path)
    unwatched.ask_others(tmp_path)
    line = failure.explain(tmp_path).line
    assert line.startswith("rank 1 hung: it never reached collective 7 of the world") and "mine.py:5" in line


def test_a_rank_that_does_not_answer_is_looked_at(rank: Callable[[int, Any], int], tmp_path: Path) -> None:
    rank(1, lambda *_: None)
    _late(tmp_path)
    unwatched.ask_others(tmp_path)
    assert "rank 1 hung: it did not respond: native code holds the GIL" in failure.explain(tmp_path).line


def test_a_stopped_rank_is_stopped(rank: Callable[[int, Any], int], tmp_path: Path) -> None:
    os.kill(rank(1, lambda *_: None), signal.SIGSTOP)
    _late(tmp_path)
    unwatched.ask_others(tmp_path)
    assert "rank 1 was stopped: SIGSTOP" in failure.explain(tmp_path).line


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_rank_that_cannot_be_asked_is_left_alone(
    handler: Any, rank: Callable[[int, Any], int], tmp_path: Path
) -> None:
    pid = rank(1, handler)
    _late(tmp_path)
    unwatched.ask_others(tmp_path)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    assert "rank 1 hung: it did not respond: nobody could ask it for its state" in failure.explain(tmp_path).line


def test_nobody_is_asked_about_an_error(rank: Callable[[int, Any], int], tmp_path: Path) -> None:
    rank(1, lambda *_: (tmp_path / "asked").touch())
    failure.report_detected(tmp_path, 0, "error", "a bug")
    unwatched.ask_others(tmp_path)
    assert not (tmp_path / "asked").exists()


def test_who_ended_because_of_another_leaves_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("MASTER_PORT", str(os.getpid()))):
        monkeypatch.setenv(name, value)
    out = tmp_path / "run"
    out.mkdir()
    because = pytest.raises(RankError, match="rank 0 ended because of another: rank 1 failed: a bug")
    with because, unwatched.alone(str(out), 0):
        folder = unwatched.reports()
        assert folder
        failure.report_detected(folder, 1, "error", "a bug")
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
    assert '"rank": 1' in (out / "failure.json").read_text()
