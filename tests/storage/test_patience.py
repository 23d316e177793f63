"""For how long storage is tried again: as long at the start of a run as in it, and shorter where nothing answers a person who waits."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from dtrain.errors import PreflightError, StoreError
from dtrain.storage import options, patience, store


class BusyError(OSError):
    """An answer of a server that is busy."""

    status = 503


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only waiting moves."""
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds: float) -> None:
        now.seconds += seconds

    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep))
    return now


def tried(clock: SimpleNamespace, error: Exception, seconds: float) -> float:
    """The time at which an operation succeeds that fails for so long; minus the time at which it is given up."""

    def act(_: object) -> None:
        if clock.seconds < seconds:
            raise error

    begin = clock.seconds
    try:
        patience.on_disk("read", "/a/b", act)
    except StoreError:
        return begin - clock.seconds
    return float(clock.seconds - begin)


@pytest.mark.parametrize(
    ("error", "given_up"), [(BusyError("slow down"), 60.0), (ConnectionResetError("cut"), 60.0), (ConnectionRefusedError("nobody"), 5.0)]
)  # fmt: skip
def test_what_answers_is_tried_as_long_at_the_start_as_in_a_run(
    error: Exception, given_up: float, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DTRAIN_PATIENCE", raising=False)
    with store.starting():
        assert -given_up <= tried(clock, error, 1000) < -given_up + 2 * patience.LONGEST_WAIT
    monkeypatch.setenv("DTRAIN_PATIENCE", "60")  # the user has said how long
    with store.starting():
        assert -60 <= tried(clock, error, 2000) < -60 + 2 * patience.LONGEST_WAIT
    assert tried(clock, error, clock.seconds + 20) >= 20, "in a run, whatever does not answer"


def test_a_user_is_told_that_storage_is_waited_for(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(clock, BusyError("slow down"), 30) > 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: cannot read /a/b so far: slow down. It is tried for ")
    assert line.endswith(" s more (DTRAIN_PATIENCE).")
    assert tried(clock, BusyError("slow down"), clock.seconds + 3) > 0
    assert not capsys.readouterr().err


def test_the_variable_reaches_processes_that_do_not_have_it_and_a_wrong_one_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DTRAIN_PATIENCE", "7.5")
    handed = options.hand_over()
    monkeypatch.delenv("DTRAIN_PATIENCE")
    told = (
        "import os, sys; from dtrain.storage import options, patience; options.take_over(sys.argv[1]);"
        "print(patience.PATIENCE, patience.UNREACHED, os.environ['DTRAIN_PATIENCE'])"
    )
    command = [sys.executable, "-c", told, handed]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "7.5 7.5 7.5\n"
    for wrong in ("1m", "-1", "nan"):
        with pytest.raises(PreflightError, match=f"DTRAIN_PATIENCE={wrong} .*a number of seconds >= 0"):
            patience.take_over(wrong)
