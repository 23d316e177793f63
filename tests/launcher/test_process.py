"""No process outlives the one that forked it, and no folder in memory the run it belongs to."""

import errno
import gc
import os
import signal
import time
from pathlib import Path

import pytest
from until import until

from dtrain.launcher import process


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_dies_with_the_process_that_forked_it() -> None:
    reading, writing = os.pipe()

    def parent() -> None:
        os.write(writing, str(process.fork(lambda: time.sleep(600))).encode())
        time.sleep(600)

    pid = process.fork(parent)
    child = int(os.read(reading, 20))
    assert lives(child)
    process.kill(pid)
    deadline = time.monotonic() + 120
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not lives(child)


def test_a_child_whose_parent_died_before_it_could_ask_ends_by_itself() -> None:
    pid = os.fork()
    if not pid:
        process.die_with(1 << 22)  # of no process: above every pid
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_how_a_child_ended_is_told() -> None:
    pids = [
        process.fork(lambda: None),
        process.fork(lambda: os._exit(3)),
        process.fork(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    ]
    assert all(process.is_gone(pid, 120) for pid in pids)
    assert [process.ended(pid) for pid in pids] == [0, 3, -signal.SIGKILL]


def test_a_claimed_folder_is_gone_when_nobody_lives_who_inherited_it(tmp_path: Path) -> None:
    scratch = tmp_path / f"dtrain-launch-{os.getpid()}"
    scratch.mkdir()

    def claim() -> None:
        process.claim(scratch)
        process.fork(lambda: time.sleep(600))  # dies with this one
        time.sleep(600)

    pid = process.fork(claim)
    folder = process.memory(scratch)
    until(lambda: (folder / "lock").exists() and not process.gone(folder, 0.01))
    process.remove_stale(tmp_path)
    assert folder.exists(), "its run lives"
    process.kill(pid)
    assert process.gone(folder, 120)
    process.remove_stale(tmp_path)
    assert not folder.exists()
    assert not scratch.exists()


def test_a_run_whose_server_was_killed_loses_nothing_to_one_that_starts_meanwhile(tmp_path: Path) -> None:
    """The command starts the server again, and holds the folders until then."""
    scratch = tmp_path / f"dtrain-launch-{os.getpid()}"
    scratch.mkdir()
    command = process.claim(scratch, "command")
    folder, server = process.memory(scratch), process.fork(lambda: (process.claim(scratch), time.sleep(600)))
    until(lambda: (folder / "lock").exists() and not process.gone(folder, 0.01))
    process.kill(server)
    assert process.gone(folder, 120), "no process of the server's lives"
    process.remove_stale(tmp_path)
    assert folder.exists() and scratch.exists() and folder not in process.stale()
    os.close(command)
    process.remove_stale(tmp_path)
    assert not folder.exists() and not scratch.exists()


def test_a_folder_that_names_another_scratch_folder_takes_none_with_it(tmp_path: Path) -> None:
    scratch, other = tmp_path / f"dtrain-launch-{os.getpid()}", tmp_path / "precious"
    other.mkdir()
    folder = process.memory(scratch)
    folder.mkdir()
    (folder / "lock").write_text(str(other))
    process.remove_stale(tmp_path)
    assert other.exists()
    assert not folder.exists()


def test_a_store_process_that_dies_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "fork", lambda work, name="": os.fork() or os._exit(1))
    with pytest.raises(ConnectionError):
        process.fork_store()


class Waiting:
    """Garbage whose end waits for a thread, as that of a process group of torch does."""

    def __init__(self) -> None:
        self.itself, self.pid = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            time.sleep(60)


def test_garbage_of_the_parent_is_not_collected_in_a_child() -> None:
    gc.disable()
    try:
        Waiting()
        pid = process.fork(gc.collect)
    finally:
        gc.enable()
    deadline = time.monotonic() + 30
    while (code := process.ended(pid)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill(pid)
    assert code == 0


def test_a_child_that_nobody_waited_for_is_gone_without_descriptors_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", absent)  # as before Linux 5.3
    reading, writing = os.pipe()
    pid = process.fork(lambda: os.read(reading, 1))
    assert not process.is_gone(pid, 0.05)
    os.write(writing, b".")
    assert process.is_gone(pid, 10)
    os.waitpid(pid, 0)
    assert process.is_gone(pid, 0)
