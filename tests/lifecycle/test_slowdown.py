"""A run that becomes ten times slower than it was says so, with the cause that its host shows, and when it is as fast again."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.lifecycle import slowdown, waiting
from dtrain.lifecycle.slowdown import Slowdown
from dtrain.resolve import resolve
from dtrain.train import train


class Stalls(Dataset[tuple[Tensor, Tensor]]):
    """Samples of a store that becomes slow."""

    def __init__(self) -> None:
        self._read = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._read += 1
        time.sleep(0.3 if self._read > 200 else 0.002)
        return torch.ones(4), torch.ones(2)


@pytest.mark.campaign("signals")
def test_a_dataset_that_becomes_slow_is_told_once_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowdown, "STEPS", 16)
    monkeypatch.setattr(slowdown, "SHORT", 0.1)
    words = [
        "data=dataset",
        "data.dataset._target_=lifecycle.test_slowdown.Stalls",
        "trust=[lifecycle]",
        "model=mlp",
        "model.inputs=4",
        "model.outputs=2",
        "batch=1",
    ]
    words += ["objective=regression", "steps=240", "hook=[]", "data.holdout=0", f"out={tmp_path}/run"]
    train(resolve(compose(words), Cluster(gpus=0, cpus=2)))
    events = map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines())
    (message,) = [event["text"] for event in events if event["event"] == "caveat" and "a step takes" in event["text"]]
    assert "of the time it waits for samples (data)" in message


def messages(one: Slowdown, *blocks: float) -> list[str]:
    """What is said within 64 steps of so many seconds each."""
    return [
        " ".join(one.look((64 * number + step, seconds) for step in range(1, 65)))
        for number, seconds in enumerate(blocks)
    ]


def test_ten_times_slower_is_told_once_until_it_is_as_fast_again() -> None:
    *quiet, slow, still, better, fast, once, again = messages(
        Slowdown(lambda: 0.0), 0.02, 0.19, 0.19, 0.22, 0.22, 1.0, 0.07, 0.04, 0.02, 5.0
    )
    assert not any((*quiet, still, better, once))
    assert slow.startswith("up to step 320 a step takes 220 ms, 11 times as long as before (20 ms): ")
    assert re.search(r"a step takes 4\d.* ms again$", fast)
    assert "250 times" in again


def test_neither_one_step_nor_a_moment_is_a_slow_run() -> None:
    one = Slowdown(lambda: 0.0)
    assert messages(one, 0.02) == [""]
    assert [*one.look([(65, 600.0)])] == []
    assert messages(one, 0.02, 0.02) == ["", ""]
    small = Slowdown(lambda: 0.0)
    assert messages(small, *[0.001] * 20, 0.012, 0.012, 0.0005, 0.0005) == [""] * 24


@pytest.fixture
def busy() -> Iterator[None]:
    """Every core has something else to do."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()


@pytest.mark.campaign("signals")
def test_processes_that_take_the_cores_are_the_cause(busy: None) -> None:
    one = Slowdown(lambda: 0.0)
    messages(one, 0.02)
    time.sleep(1.0)
    assert f"of its {waiting.cores()} cores" in messages(one, 5.0)[0]


@pytest.mark.parametrize(
    ("name", "after", "cause"),
    [("_throttled", 50.0, "(its CPU quota)"), ("_throttled", 0.0, "this host shows no cause")],
)
def test_a_quota_that_is_used_up_is_the_cause(
    name: str, after: float, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a control group with a quota, which a test may not set."""
    monkeypatch.setattr(waiting.Meter, "others", lambda self: 0.0)
    one = Slowdown(lambda: 0.0)
    messages(one, 0.02)
    monkeypatch.setattr(slowdown, name, lambda: after)
    assert cause in messages(one, 5.0)[0]
