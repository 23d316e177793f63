"""A rank that says where it is, and one that ends because nothing moves."""

import ctypes
import json
import os
import signal
import time
import timeit
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from small import mesh_of
from torch.distributed import distributed_c10d
from until import until

from dtrain.launcher.process import fork
from dtrain.lifecycle import failure
from dtrain.lifecycle.kernel_log import KernelLog
from dtrain.lifecycle.watchdog import Watchdog, sequence_numbers


def asleep_in_user_code(seconds: float) -> None:
    time.sleep(seconds)


def holding_the_interpreter(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)  # PyDLL, unlike CDLL, does not let go of the interpreter


def ended(work: Any, seconds: float = 120) -> int:
    """How a process of its own ends that does `work`, with torch warm."""
    pid = fork(work)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"it still ran after {seconds} s")


def alone(folder: Path, timeout: float, *acts: Any) -> None:
    """Steps of one rank, each doing one of `acts`, None being rest."""
    torch.set_num_threads(1)
    with mesh_of() as mesh, Watchdog(mesh, str(folder), timeout=timeout, batch=8) as watchdog:
        for step, act in enumerate(acts):
            watchdog.begin_step(step, 8 * step)
            if act is None:
                watchdog.pause_hang_detection()
                time.sleep(4 * timeout)
            else:
                act()


def test_a_step_that_takes_too_long_ends_the_process_and_says_where(tmp_path: Path) -> None:
    assert ended(lambda: alone(tmp_path, 2.0, int, int, lambda: asleep_in_user_code(600))) == 1
    failed = failure.explain(tmp_path)
    assert failed.facts["kind"] == "hung"
    assert (failed.facts["step"], failed.facts["samples"]) == (3, [16, 23])
    assert "in asleep_in_user_code" in failed.line
    assert failed.line.startswith("rank 0 hung in step 3 (positions 16 to 23 of the order): no progress for")
    assert any("asleep_in_user_code" in line for line in failed.facts["stack"])


@pytest.mark.campaign("signals")
def test_the_first_step_has_more_time_and_what_is_between_steps_has_all(tmp_path: Path) -> None:
    assert ended(lambda: alone(tmp_path, 1.5, lambda: time.sleep(2), None, int)) == 0
    assert not list(tmp_path.glob("failure-*"))


@pytest.mark.campaign("signals")
def test_a_part_between_two_steps_has_more_time_too(tmp_path: Path) -> None:
    def evaluating(timeout: float) -> None:
        with mesh_of() as mesh, Watchdog(mesh, str(tmp_path), timeout=timeout, batch=8) as watchdog:
            for step in range(3):
                watchdog.begin_step(step, 8 * step)
                watchdog.pause_hang_detection()
            watchdog.resume_hang_detection()
            time.sleep(2 * timeout)
            watchdog.pause_hang_detection()

    assert ended(lambda: evaluating(1.5)) == 0
    assert not list(tmp_path.glob("failure-*"))


@pytest.mark.campaign("signals")
def test_an_interpreter_held_by_native_code_ends_too_and_leaves_its_stack(tmp_path: Path) -> None:
    assert ended(lambda: alone(tmp_path, 1.5, int, int, lambda: holding_the_interpreter(600))) == 1
    failure.report_exit(tmp_path, 0, 1, KernelLog())
    failed = failure.explain(tmp_path)
    assert failed.line.startswith(
        "rank 0 hung in step 3 (positions 16 to 23 of the order): native code held the GIL, at lifecycle/test_watchdog.py:"
    )
    assert "in holding_the_interpreter" in failed.line


def test_a_crash_leaves_its_stack(tmp_path: Path) -> None:
    assert ended(lambda: alone(tmp_path, 60, int, lambda: ctypes.string_at(0))) == -signal.SIGSEGV
    failure.report_exit(tmp_path, 0, -signal.SIGSEGV, KernelLog())
    failed = failure.explain(tmp_path)
    assert failed.line.startswith("rank 0 crashed in step 2 (positions 8 to 15 of the order): SIGSEGV")
    assert "lifecycle/test_watchdog.py" in failed.line


def ask_until_it_waits(pid: int, folder: Path) -> None:
    """Where it is, again and again: it may be on its way from one collective to the next while its stack and its report are written."""
    report, stack = folder / "report-1.json", folder / "stack-1.txt"

    def waits() -> bool:
        collective = json.loads(report.read_text())["collective"] if report.exists() else None
        return collective is not None and "barrier" not in collective and "in sum" in stack.read_text()

    deadline = time.monotonic() + 120
    while not waits():
        assert time.monotonic() < deadline
        report.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR2)
        for _ in range(500):
            if report.exists():
                break
            time.sleep(0.01)


def reported(folder: Path) -> dict[str, Any]:
    """Rank 1 waits in a collective; it is asked where it is."""
    with mesh_of(dp_replicate=2) as mesh, Watchdog(mesh, str(folder), timeout=60, batch=8) as watchdog:
        watchdog.begin_step(4, 32)
        mesh.barrier()
        if mesh.rank == 0:
            ask_until_it_waits(int((folder / "pid").read_text()), folder)
        mesh.sum(torch.zeros(1))
        return sequence_numbers()


def test_a_rank_in_a_collective_answers_where_it_is(tmp_path: Path) -> None:
    def work() -> dict[str, Any]:
        if os.environ["RANK"] == "1":
            (tmp_path / "pid").write_text(str(os.getpid()))
        return reported(tmp_path)

    numbers = ranks(2, work)
    assert numbers == [{"the world": 2}] * 2
    report = json.loads((tmp_path / "report-1.json").read_text())
    assert (report["step"], report["samples"], report["groups"]) == (5, [32, 39], {"the world": 2})
    assert report["collective"].startswith("all_reduce (dtrain/mesh/__init__.py:")
    assert "in sum" in (tmp_path / "stack-1.txt").read_text()
    assert [(call["call"], call["number"], call["state"]) for call in report["calls"]["the world"]] == [
        ("barrier", 1, "completed"), ("all_reduce", 2, "scheduled"),
    ]  # fmt: skip


def world_timeout() -> float:
    """Seconds, of the next collective."""
    assert dist.group.WORLD is not None
    return float(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def late(folder: Path) -> str:
    """Rank 1 does not come to the fourth collective; the group was made with a long timeout."""
    with mesh_of(dp_replicate=2) as mesh:
        try:
            with Watchdog(mesh, str(folder), timeout=4.0, batch=8) as watchdog:
                for step in range(3):
                    watchdog.begin_step(step, 8 * step)
                    watchdog.pause_hang_detection()  # or the watchdog would be as early
                    mesh.barrier()
                until(lambda: world_timeout() == 4.0)
                if mesh.rank == 0:
                    mesh.sum(torch.zeros(1))
                until(lambda: [*folder.glob("failure-0-*.json")])
        except RuntimeError as error:
            return str(error)
    return ""


def test_collectives_time_out_after_the_first_step_and_the_late_rank_is_named(tmp_path: Path) -> None:
    message, nothing = ranks(2, late, tmp_path)
    assert "Timed out waiting 4000ms" in message
    assert nothing == ""
    left = [json.loads(path.read_text()) for path in tmp_path.glob("failure-0-*.json")]
    assert [facts["kind"] for facts in left] == ["timeout"]
    assert left[0]["groups"] == {"the world": 4}


def test_what_is_private_in_torch_is_where_it_was() -> None:
    def work() -> list[Any]:
        with mesh_of(dp_replicate=2):
            group = dist.group.WORLD
            assert group is not None
            return [
                group in distributed_c10d._world.pg_names,
                sorted(distributed_c10d._world.pg_group_ranks[group]),
                group.group_desc,
            ]

    assert ranks(2, work) == [[True, [0, 1], "default_pg"]] * 2


@pytest.mark.parametrize("folder", [True, False])
def test_a_beat_costs_nothing_to_speak_of(folder: bool, tmp_path: Path) -> None:
    def work() -> float:
        with mesh_of() as mesh, Watchdog(mesh, str(tmp_path) if folder else None, timeout=60, batch=8) as watchdog:
            return min(timeit.repeat(lambda: watchdog.begin_step(3, 24), number=1000, repeat=20)) / 1000

    (seconds,) = ranks(1, work)
    assert seconds < 20e-6  # a microsecond on an idle core; not a figure, only no system call
