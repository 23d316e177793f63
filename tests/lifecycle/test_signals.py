"""What a signal does to a process: before it began, while it trains, and to the helpers it forked."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from pool import ranks

from dtrain.launcher.process import fork
from dtrain.lifecycle import signals
from dtrain.storage import lease


def ended(number: int) -> int:
    try:
        with signals.ending():
            os.kill(os.getpid(), number)
            time.sleep(5)
    except signals.StopRequested as asked:
        return asked.exit_code
    return 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_while_nothing_has_begun_a_signal_ends(number: int, code: int) -> None:
    assert ranks(1, ended, number) == [code]


def swallowed() -> int:
    try:
        with signals.ending():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
            finally:
                raise AttributeError("while tidying up")
    except signals.StopRequested as asked:
        return asked.exit_code


def test_what_a_library_makes_of_it_is_still_the_wish_to_stop() -> None:
    assert ranks(1, swallowed) == [75]


class Torn:
    """Hears the signal where nobody can raise: Python prints what was raised there, and goes on."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def in_a_finalizer() -> None:
    torn = Torn()
    del torn


def in_an_except() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    except:  # noqa: E722 - as somebody's library does
        pass


def lost(lose: Callable[[], None]) -> str:
    """How a sleep ends that comes after the loss."""
    try:
        with signals.ending():
            lose()
            time.sleep(60)
    except signals.StopRequested:
        return "asked"
    return "slept"


@pytest.mark.parametrize("lose", [in_a_finalizer, in_an_except])
def test_what_gets_lost_is_raised_again_and_nobody_sees_it(
    lose: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "ENDING_SECONDS", 120.0)
    assert ranks(1, lost, lose) == ["asked"]
    assert "Traceback" not in capfd.readouterr().err


def ignored() -> None:
    with signals.ending():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(60)


def imported() -> None:
    with signals.ending(), signals.importing():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(60)


@pytest.mark.parametrize("work", [ignored, imported])
def test_who_swallows_it_is_ended_all_the_same(
    work: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "ENDING_SECONDS", 0.2)
    _, status = os.waitpid(fork(work), 0)
    assert os.waitstatus_to_exitcode(status) == 75
    assert "stopped by SIGTERM" in capfd.readouterr().err


def importing_with_a_lease(out: str) -> None:
    with signals.ending(), lease.hold(out), signals.importing():
        os.kill(os.getpid(), signal.SIGINT)


def swallowing_with_a_lease(out: str) -> None:
    signals.ENDING_SECONDS = 0.1
    with signals.ending(), lease.hold(out):
        for _ in range(1000):
            with contextlib.suppress(BaseException):
                if not signals.asked():
                    os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)


@pytest.mark.parametrize("act", [importing_with_a_lease, swallowing_with_a_lease])
def test_who_is_ended_in_an_import_or_a_library_gives_its_lease_back(
    act: Callable[[str], None], tmp_path: Path
) -> None:
    child = multiprocessing.get_context("fork").Process(target=act, args=(str(tmp_path),))
    child.start()
    child.join(30)
    assert child.exitcode == 130
    assert (lease.holder(str(tmp_path))[0], lease.exit_code(str(tmp_path))) == ("free", 130)


def noted(*numbers: int, apart: float, forwarded: bool = False) -> int | str:
    """By a clock that goes on by `apart` seconds from one signal to the next."""
    now = 5000.0
    signals.time = SimpleNamespace(monotonic=lambda: now)  # type: ignore[attr-defined]
    signals.listen(forwarded=forwarded)
    try:
        for number in numbers:
            os.kill(os.getpid(), number)
            now += apart
    except KeyboardInterrupt:
        return "at once"
    return signals.stop_request()


@pytest.mark.parametrize(
    ("numbers", "apart", "forwarded", "then"),
    [
        ([signal.SIGTERM], 0, False, signal.SIGTERM),
        ([signal.SIGINT, signal.SIGINT], 0, False, "at once"),
        (
            [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM],
            0,
            False,
            signal.SIGTERM,
        ),  # a scheduler and a launcher say the same
        ([signal.SIGTERM, signal.SIGTERM], 1.1, False, "at once"),
        ([signal.SIGTERM, signal.SIGTERM], 1.1, True, signal.SIGTERM),  # the launcher ends it itself
    ],
)
def test_a_wish_is_noted_and_its_repetition_ends(
    numbers: list[int], apart: float, forwarded: bool, then: int | str
) -> None:
    assert ranks(1, lambda: noted(*numbers, apart=apart, forwarded=forwarded)) == [then]


def hung() -> None:
    with signals.ending(), ThreadPoolExecutor(1) as pool:
        signals.listen()
        reading = pool.submit(time.sleep, 60)
        signals.note(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        reading.result()


def test_a_repetition_ends_who_waits_for_a_thread(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signals, "ENDING_SECONDS", 0.2)
    began = time.monotonic()
    _, status = os.waitpid(fork(hung), 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert time.monotonic() - began < 20
    assert "ended by a second request" in capfd.readouterr().err


def restored(interrupt: Callable[..., None] | signal.Handlers) -> bool:
    before = [interrupt, signal.SIG_DFL, lambda *_: None, *[signal.SIG_DFL] * (len(signals.STOP_SIGNALS) - 3)]
    for number, handler in zip(signals.STOP_SIGNALS, before, strict=True):
        signal.signal(number, handler)
    with signals.ending(), signals.training():
        signals.listen()
    return [signal.getsignal(number) for number in signals.STOP_SIGNALS] == before


@pytest.mark.parametrize(
    "interrupt", [signal.default_int_handler, signal.SIG_IGN]
)  # a script's shell starts `... &` with SIGINT ignored
def test_signals_mean_what_they_meant_before(interrupt: Callable[..., None] | signal.Handlers) -> None:
    assert ranks(1, restored, interrupt) == [True]


def from_before() -> int:
    signals.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    try:
        with signals.training():
            return 0
    except signals.StopRequested as asked:
        return asked.exit_code


def test_a_wish_from_before_ends_a_training_that_has_not_begun() -> None:
    assert ranks(1, from_before) == [75]


def helpers(number: int) -> int | None:
    """How a child that a training rank forked ends, when it gets a signal before it is let go on."""
    (over, let), (there, written) = os.pipe(), os.pipe()

    def wait() -> None:
        os.write(written, b"1")
        os.read(over, 1)

    with signals.training():
        signals.listen()
        child = multiprocessing.get_context("fork").Process(target=wait)
        child.start()
        os.read(there, 1)
        os.kill(child.pid or 0, number)
        os.write(let, b"1")
        child.join()
        return child.exitcode


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGUSR1, 0), (signal.SIGINT, 0), (signal.SIGUSR2, 0), (signal.SIGTERM, -signal.SIGTERM)],
)
def test_a_forked_helper_is_not_asked_but_can_be_terminated(number: int, code: int) -> None:
    assert ranks(1, helpers, number) == [code]


def test_other_threads_may_call_it() -> None:
    code = (
        "import threading\nfrom dtrain.lifecycle import signals\n"
        "def work():\n    with signals.training():\n        signals.listen()\n        print('trained')\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "trained\n", done.stderr
