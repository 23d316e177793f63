"""Threads spin while they wait for each other where cores are free, and hardly where others compute; no number depends on it."""

import os
import threading
import time

import commands
import pytest
import torch
from torch import nn

from dtrain.lifecycle import waiting

DEADLINE = 120
BESIDE = f"""
import os, subprocess, sys, threading, time
from dtrain.lifecycle import waiting
waiting.PERIOD = 0.2
with waiting.yielding(waiting.cores(), {{}}):
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(waiting.cores())]
    try:
        before = time.monotonic()
        while time.monotonic() - before < {DEADLINE} and not any(thread.name == "dtrain-asleep" for thread in threading.enumerate()):
            time.sleep(0.05)
        print([thread.name for thread in threading.enumerate()])
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
"""


def test_processes_that_take_the_cores_are_seen() -> None:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in (*waiting.CHOSEN, "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE")
    }
    ran = commands.python("-c", BESIDE, timeout=2 * DEADLINE, env=env)
    assert "dtrain-asleep" in ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("threads", "environ"), [(1, {}), (2, {"GOMP_SPINCOUNT": "1"}), (2, {"OMP_WAIT_POLICY": "ACTIVE"})]
)
def test_one_thread_waits_for_nobody_and_who_chose_is_left_alone(threads: int, environ: dict[str, str]) -> None:
    with waiting.yielding(threads, environ):
        assert not any(thread.name == "dtrain-waiting" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("taken", "threads", "ranks", "crowds"),
    [(0.1, 4, 1, False), (0.9, 4, 1, True), (0.9, 2, 1, False), (0.9, 2, 2, True)],
)
def test_what_counts_are_cores_that_our_threads_need(
    taken: float, threads: int, ranks: int, crowds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "cores", lambda: 4)
    monkeypatch.setattr(waiting, "ranks", lambda: ranks)
    monkeypatch.setattr(waiting.Meter, "others", lambda self: taken)
    assert waiting.Meter().crowds(threads) is crowds


def sleepers() -> int:
    return sum(thread.name == "dtrain-asleep" for thread in threading.enumerate())


def until(number: int) -> None:
    before = time.monotonic()
    while sleepers() != number:
        assert time.monotonic() - before < DEADLINE
        time.sleep(0.01)


def gradients() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    model(torch.randn(512, 256)).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_while_others_compute_a_thread_sleeps_and_numbers_stay_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = [4.0]
    monkeypatch.setattr(waiting, "PERIOD", 0.01)
    monkeypatch.setattr(waiting, "cores", lambda: 2)
    monkeypatch.setattr(waiting.Meter, "others", lambda self: taken[0])
    alone = gradients()
    with waiting.yielding(2, {}):
        until(1)
        beside = gradients()
        taken[0] = 0.0
        until(0)
        taken[0] = 4.0
        until(1)
    assert sleepers() == 0
    assert all(map(torch.equal, alone, beside))
