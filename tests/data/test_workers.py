"""Loading processes: they read what the rank would, name what went wrong in them, and leave nothing behind."""

import multiprocessing
import os
import signal
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.test_dataset import Squares, take
from torch.utils.data import Subset, TensorDataset

from dtrain.data.dataset import Dataset
from dtrain.launcher.process import fork, is_gone
from dtrain.lifecycle import failure
from dtrain.lifecycle.signals import STOP_SIGNALS


def test_loading_processes_read_the_same_samples() -> None:
    dataset = Subset(TensorDataset(torch.arange(20.0), torch.arange(20)), range(20))
    source = Dataset(dataset, workers=2, holdout=0)
    try:
        assert torch.equal(
            take(source, [3, 1, 4, 15, 9])["inputs"], take(Dataset(dataset, holdout=0), [3, 1, 4, 15, 9])["inputs"]
        )
        assert source.loading == "thread"
    finally:
        source._processes.close()


class Broken(Squares):
    """Sample 1 raises what pickle can bring to the rank, sample 2 what it cannot, sample 3 what has no text either."""

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            raise ValueError("planned")
        if index == 2:
            raise UnreadableError("a.jpg", 7)
        if index == 3:
            raise MuteError("a.jpg", 7)
        return super().__getitem__(index)


class UnreadableError(Exception):
    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file} is torn at {line}")


class MuteError(UnreadableError):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_what_a_loading_process_raises_is_placed_at_the_line_of_the_users_code() -> None:
    source = Dataset(Broken(), workers=1, holdout=0)
    try:
        for sample, message in (
            (1, "ValueError: planned"),
            (2, "UnreadableError: a.jpg is torn at 7"),
            (3, "MuteError: (no message: its __str__ raises ValueError)"),
        ):
            with pytest.raises(Exception) as raised:
                take(source, [source.original(np.arange(20)).tolist().index(sample)])
            facts = failure.facts_of(raised.value, 0)
            assert facts["error"].endswith(f"{message}, reading sample {sample}, epoch 0")
            assert facts["where"].endswith("in __getitem__")
            assert "test_workers.py:" in facts["where"]
            assert message in facts["message"]
    finally:
        source._processes.close()


class Deadly(Squares):
    """Sample 1 is killed by the kernel, sample 2 breaks a library, sample 3 ends the process."""

    def __getitem__(self, index: int) -> Any:
        if index in (1, 2):
            os.kill(os.getpid(), {1: signal.SIGKILL, 2: signal.SIGSEGV}[index])
        if index == 3:
            os._exit(4)
        return super().__getitem__(index)


@pytest.mark.campaign("kills")
@pytest.mark.parametrize(
    ("sample", "ending"),
    [(1, "was ended by SIGKILL"), (2, "was ended by SIGSEGV"), (3, "ended by itself with exit code 4")],
)
def test_a_loading_process_that_died_is_told_with_its_sample_and_its_signal(sample: int, ending: str) -> None:
    source = Dataset(Deadly(), workers=2, holdout=0)
    order = source.original(np.arange(20)).tolist()
    try:
        with pytest.raises(
            RuntimeError, match=f"a loading process {ending} while it read sample {sample} of data.dataset"
        ):
            take(source, [order.index(7), order.index(8), order.index(9), order.index(sample)])
    finally:
        source._processes.close()


def test_loading_processes_hear_no_signal_and_die_with_their_rank() -> None:
    reading, writing = os.pipe()

    def rank() -> None:
        source = Dataset(Squares(), workers=1, holdout=0)
        source.take(np.arange(2), np.zeros(2, dtype=np.int64))
        (worker,) = (child.pid for child in multiprocessing.active_children())
        for number in STOP_SIGNALS:
            os.kill(worker, number)
        source.take(np.arange(2), np.zeros(2, dtype=np.int64))
        os.write(writing, str(worker).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(fork(rank), 0)
    worker, deadline = int(os.read(reading, 100)), time.monotonic() + 120
    stat = Path(f"/proc/{worker}/stat")
    while stat.exists() and ") Z" not in stat.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.close(reading)
    os.close(writing)


def test_loading_processes_begin_with_signals_blocked() -> None:
    """A Ctrl-C while they still import torch would print a traceback of each."""
    reading, writing = os.pipe()

    def rank() -> None:
        resource_tracker._resource_tracker = resource_tracker.ResourceTracker()  # type: ignore[attr-defined]
        resource_tracker.ensure_running = resource_tracker._resource_tracker.ensure_running  # type: ignore[attr-defined]
        resource_tracker.getfd = resource_tracker._resource_tracker.getfd  # type: ignore[attr-defined]
        source = Dataset(Squares(), workers=2, holdout=0)
        _ = source._processes
        for child in multiprocessing.active_children():
            os.write(writing, Path(f"/proc/{child.pid}/status").read_bytes().split(b"SigBlk:")[1].split()[0] + b" ")

    os.waitpid(fork(rank), 0)
    os.close(writing)
    with os.fdopen(reading) as masks:
        blocked = [int(mask, 16) for mask in masks.read().split()]
    assert len(blocked) == 2
    assert all(mask >> (number - 1) & 1 for mask in blocked for number in STOP_SIGNALS)


@pytest.mark.campaign("kills")
def test_a_rank_that_ends_leaves_no_name_in_the_system_and_its_processes_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Named semaphores would stay for ever; a process that is still starting would not find them."""
    names = multiprocessing.get_context("fork").SimpleQueue()
    monkeypatch.setattr(resource_tracker, "register", lambda name, kind: names.put(f"{kind} {name}"))

    def rank() -> None:
        source = Dataset(Squares(), workers=4, holdout=0)  # its processes end with it
        source.take(np.arange(1), np.zeros(1, dtype=np.int64))
        os.write(writing, " ".join(str(child.pid) for child in multiprocessing.active_children()).encode())

    reading, writing = os.pipe()
    os.waitpid(fork(rank), 0)
    os.close(writing)
    workers = [int(pid) for pid in os.read(reading, 1000).split()]
    os.close(reading)
    assert len(workers) == 4
    assert all(is_gone(pid, 120) for pid in workers)
    assert names.empty()
    assert capfd.readouterr().err == ""
