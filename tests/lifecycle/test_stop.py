"""The wish to stop: heard by one, agreed by all, obeyed after the same step."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pool import ranks
from small import mesh_of

from dtrain.lifecycle import signals, stop
from dtrain.lifecycle.signals import StopRequested
from dtrain.lifecycle.stop import StopSignal


def alone(number: int | None, after: int | None) -> tuple[int, str]:
    """Run up to ten steps; the signal comes during the third."""
    with mesh_of() as mesh, StopSignal(after=after) as asked:
        for step in range(10):
            if asked.requested(step, mesh):
                return step, asked.status
            asked.listen()
            if step == 2 and number:
                os.kill(os.getpid(), number)
    return 10, asked.status


def at_the_end_of_the_first() -> tuple[int, str]:
    """The signal comes when the first step is done and its turn is not, as in an evaluation."""
    with mesh_of() as mesh, StopSignal(after=None) as asked:
        for step in range(10):
            if asked.requested(step, mesh):
                return step, asked.status
            asked.listen()
            os.kill(os.getpid(), signal.SIGTERM)
    return 10, asked.status


def test_a_first_step_that_is_done_is_not_lost() -> None:
    assert ranks(1, at_the_end_of_the_first) == [(1, "preempted")]


@pytest.mark.parametrize(
    ("number", "after", "expected"),
    [
        (None, None, (10, "finished")),
        (None, 4, (4, "stopped")),
        (signal.SIGTERM, None, (3, "preempted")),
        (signal.SIGUSR1, None, (3, "preempted")),
        *(
            [(signal.SIGHUP, None, (3, "preempted"))] if signal.SIGHUP in signals.STOP_SIGNALS else []
        ),  # not under nohup
        (signal.SIGINT, None, (3, "interrupted")),
        (signal.SIGTERM, 3, (3, "preempted")),
    ],
)
def test_it_stops_after_the_step_in_which_it_was_asked(
    number: int | None, after: int | None, expected: tuple[int, str]
) -> None:
    assert ranks(1, alone, number, after) == [expected]


def before_the_first_step(number: int) -> int:
    with mesh_of() as mesh:
        try:
            with StopSignal(after=None) as asked:
                asked.requested(7, mesh)
                os.kill(os.getpid(), number)
                time.sleep(5)
        except StopRequested as ended:
            return ended.exit_code
    return 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_before_a_step_is_done_there_is_nothing_to_wait_for(number: int, code: int) -> None:
    assert ranks(1, before_the_first_step, number) == [code]


def limited(seconds: float) -> tuple[int, str, str]:
    """A command began 100 s ago by the clock of rank 0, 97 s by that of rank 1; each step takes a hundredth of a second by both."""
    steps = 0

    def clock() -> float:
        return 5000.0 + 0.01 * steps

    stop.time = SimpleNamespace(monotonic=clock, perf_counter=clock)  # type: ignore[attr-defined]
    with mesh_of(dp_replicate=2) as mesh:
        os.environ["DTRAIN_BEGAN"] = str(clock() - 100 + 3 * mesh.rank)
        with StopSignal(after=None, seconds=seconds) as asked:
            for steps in range(1000):
                if asked.requested(steps, mesh):
                    return steps, asked.status, asked.cause
                asked.listen()
    return 1000, asked.status, asked.cause


def test_the_time_limit_counts_from_the_command_and_holds_for_all_ranks_alike() -> None:
    """The limit is over in step 31 of rank 0, and would be in step 331 of rank 1; a quarter of a second later they have met."""
    one, two = ranks(2, limited, 100.305)
    assert one == two
    assert one[1:] == ("preempted", "the time limit")
    assert 31 <= one[0] <= 31 + 25
    assert ranks(2, limited, -1) == [(0, "preempted", "the time limit")] * 2


def jumped(seconds: float) -> tuple[int, str]:
    """Somebody sets the clock of the machine, by so much, in the third step."""
    os.environ["DTRAIN_BEGAN"] = str(time.monotonic())
    with mesh_of() as mesh, StopSignal(after=None, seconds=3600) as asked:
        for step in range(10):
            if asked.requested(step, mesh):
                return step, asked.cause
            asked.listen()
            if step == 2:
                there = time.time() + seconds
                time.time = lambda: there  # noqa: B023 - it is set once
    return 10, asked.cause


@pytest.mark.parametrize("seconds", [-7200.0, 7200.0])
def test_a_clock_that_is_set_moves_no_time_limit(seconds: float) -> None:
    assert ranks(1, jumped, seconds) == [(10, "")]


def long_evaluation(signalled: bool, reports: str = "") -> tuple[int, str]:
    """How many parts of something long are done, when rank 1 hears a signal in the third."""
    os.environ["DTRAIN_REPORTS"] = reports
    with mesh_of(dp_replicate=2) as mesh, StopSignal(after=None) as asked:
        asked.requested(0, mesh)
        asked.listen()
        for part in range(300):
            if asked.meanwhile(mesh):
                return part, asked.cause
            if signalled and part == 3 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.005)
    return 300, asked.cause


def test_a_long_evaluation_is_broken_off_by_all_ranks_together(tmp_path: Path) -> None:
    one, two = ranks(2, long_evaluation, True)
    assert one == two
    assert 3 < one[0] < 300
    assert one[1] == "SIGTERM to rank 1"
    (tmp_path / signals.PASSED_ON).touch()
    assert [cause for _, cause in ranks(2, long_evaluation, True, str(tmp_path))] == ["SIGTERM"] * 2
    assert ranks(2, long_evaluation, False) == [(300, "")] * 2


def twice() -> bool:
    with mesh_of() as mesh, StopSignal(after=None) as asked:
        try:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            asked.requested(0, mesh)
        except KeyboardInterrupt:
            return True
    return False


def test_the_second_signal_stops_at_once() -> None:
    assert ranks(1, twice) == [True]


def afterwards(interrupt: Callable[..., None] | signal.Handlers) -> bool:
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with StopSignal(after=None):
        pass
    return (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == (interrupt, signal.SIG_DFL)


@pytest.mark.parametrize(
    "interrupt", [signal.default_int_handler, signal.SIG_IGN]
)  # a script's shell starts `... &` with SIGINT ignored
def test_signals_mean_what_they_meant_before(interrupt: Callable[..., None] | signal.Handlers) -> None:
    assert ranks(1, afterwards, interrupt) == [True]


def together(number: int | None, after: int | None) -> tuple[int, str]:
    """Rank 1 alone hears the signal; ranks are not equally fast."""
    with mesh_of(dp_replicate=2) as mesh, StopSignal(after=after) as asked:
        for step in range(2000):
            if asked.requested(step, mesh):
                return step, asked.status
            asked.listen()
            if number and mesh.rank == 1 and step == 5:
                os.kill(os.getpid(), number)
            mesh.barrier()  # a step meets the others
            time.sleep(0.001 * mesh.rank)
    return 2000, asked.status


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, "preempted"), (signal.SIGINT, "interrupted")])
def test_all_ranks_stop_after_the_same_step(number: int, status: str) -> None:
    one, two = ranks(2, together, number, None)
    assert one == two
    assert one[1] == status
    assert 5 < one[0] < 2000


def measuring_another_pace() -> int:
    """Rank 1 alone hears the signal, and counts fewer parts of an evaluation in the time between two meetings."""
    with mesh_of(dp_replicate=2) as mesh, StopSignal(after=None) as asked:
        stop.Pace.turns = lambda pace, seconds: (40.0, 5.0)[mesh.rank]  # type: ignore[method-assign]
        asked.listen()
        for part in range(1000):
            if asked.meanwhile(mesh):
                return part
            if mesh.rank == 1 and part == 30:
                os.kill(os.getpid(), signal.SIGTERM)
    return 1000


def test_ranks_that_measure_another_pace_stop_after_the_same_part() -> None:
    one, two = ranks(2, measuring_another_pace)
    assert one == two < 1000


def test_the_step_the_user_named_is_kept_to_the_step() -> None:
    assert ranks(2, together, None, 7) == [(7, "stopped")] * 2
