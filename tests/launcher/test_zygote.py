"""The zygote: children with the environment of now, their exit codes, and what becomes of a run whose zygote is killed."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import COMMAND
from killing import family
from launching import started, steps_of, wait_for_step

from dtrain.launcher import process, zygote

SLOW = ["model._target_=launching.Slow", "model.rank=5", "devices=2", "batch=8", "launcher=local", "steps=40"]


def writes(path: str) -> None:
    """What a child is: its environment, its session, whether it holds torch, which signals it blocks."""
    with Path(path).open("w") as file:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        print(
            os.environ["OF_NOW"],
            "GONE" in os.environ,
            os.getsid(0) == os.getpid(),
            signal.SIGTERM in blocked,
            os.getppid(),
            file=file,
        )


def exits(code: int) -> None:
    raise SystemExit(code)


def sleeps() -> None:
    time.sleep(600)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[zygote.Zygote]:
    monkeypatch.setenv("GONE", "when the child is forked")
    with zygote.kept():
        zygote.begin()
        begun = zygote._kept[-1]
        assert begun
        yield begun


def test_a_child_has_the_environment_of_now_and_a_session_of_its_own(
    begun: zygote.Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_NOW", "set after the zygote was forked")
    monkeypatch.delenv("GONE")
    child = zygote.fork(f"{__name__}.writes", str(tmp_path / "said"))
    assert child and child.wait() == 0
    assert (tmp_path / "said").read_text() == f"set after the zygote was forked False True True {begun.pid}\n"


def test_children_end_with_their_own_codes_in_any_order(begun: zygote.Zygote) -> None:
    first, second, third = (
        zygote.fork(f"{__name__}.{name}", *told) for name, told in (("sleeps", ()), ("exits", (7,)), ("exits", (0,)))
    )
    assert first and second and third
    assert (third.wait(), second.wait()) == (0, 7)
    first.kill()
    assert first.wait() == first.wait() == -signal.SIGKILL


def test_children_do_not_outlive_their_zygote_nor_that_its_context() -> None:
    with zygote.kept():
        zygote.begin()
        child = zygote.fork(f"{__name__}.sleeps")
        assert child
        zygote.kill()
        assert process.is_gone(child.pid, 10)
        assert child.wait() == -signal.SIGKILL
        assert zygote.fork(f"{__name__}.exits", 0) is None, "there is none any more"
        zygote.begin()
        child = zygote.fork(f"{__name__}.sleeps")
        assert child
    assert process.is_gone(child.pid, 10)
    zygote.begin()
    assert zygote.fork(f"{__name__}.exits", 0) is None, "none is kept"


def test_a_process_with_threads_is_not_forked() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        with zygote.kept():
            zygote.begin()
            assert zygote.fork(f"{__name__}.exits", 0) is None
    finally:
        over.set()
        thread.join()


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("target", ["zygote", "server"])
def test_a_run_goes_on_when_what_forked_its_ranks_is_killed(target: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = started(out, *SLOW, "checkpoint.every=5")
    wait_for_step(out, 6)
    (zygotes, servers) = family(command.pid)["zygote"], family(command.pid)["server"]
    assert len(zygotes) == len(servers) == 1, "the server is a child of the zygote"
    os.kill(family(command.pid)[target][0], signal.SIGKILL)
    output = command.communicate(timeout=300)[0]
    assert command.returncode == 0, output
    assert output.count("the launcher's server was killed by SIGKILL and starts again") == 1
    assert steps_of(out) == list(range(1, 41))


def test_a_command_that_is_told_to_go_while_torch_is_loaded_goes_at_once(tmp_path: Path) -> None:
    """The zygote is stopped meanwhile, as one that loads for ever."""
    command, deadline = started(tmp_path / "run", *SLOW, by=COMMAND), time.monotonic() + 60
    while not list((tmp_path / "run-scratch").glob("dtrain-*/*")):  # the launcher has begun, and waits for its server
        assert time.monotonic() < deadline
        time.sleep(0.001)
    (loading,) = family(command.pid)["zygote"]
    os.kill(loading, signal.SIGSTOP)
    command.send_signal(signal.SIGTERM)
    output = command.communicate(timeout=60)[0]
    assert command.returncode == 75, output
    assert "stopped by SIGTERM before there was anything new to save" in output
    assert process.is_gone(loading, 10)


def test_a_stopped_zygote_does_not_keep_a_run_from_its_end(tmp_path: Path) -> None:
    command = started(tmp_path / "run", *SLOW)
    wait_for_step(tmp_path / "run", 1)
    os.kill(family(command.pid)["zygote"][0], signal.SIGSTOP)
    output = command.communicate(timeout=300)[0]
    assert command.returncode == 0, output
