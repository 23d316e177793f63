"""A process that loads samples and does not come back: the line it is at, and its sample, are what the run says of its end."""

import ctypes
import json
import os
import signal
import time
from pathlib import Path

import commands
import numpy as np
import pytest

from dtrain.config import environment
from dtrain.data.dataset import Dataset
from dtrain.lifecycle import loaders
from dtrain.lifecycle.signals import REPORT

SAMPLE = 77
WORDS = (
    "model=mlp", "data=dataset", "data.dataset._target_=lifecycle.test_loaders.Stuck", "data.holdout=0", "data.workers=1", "trust=[lifecycle]",
    "data.inputs=0", "data.targets=1", "model.inputs=4", "model.outputs=1", "backend=gloo", "backend.timeout=5", "steps=100",
    "objective=regression", "log.every=1", "launcher=local", "launcher.restarts=0",
)  # fmt: skip


class Stuck:
    """Reading one sample takes for ever, in a loading process."""

    def __init__(self, way: str, sample: int = SAMPLE) -> None:
        self.way, self.sample, self.rank = way, sample, os.getpid()

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == self.sample and os.getpid() != self.rank:
            getattr(self, self.way)()
        return np.full(4, index, np.float32), np.full(1, index, np.float32)

    def asleep(self) -> None:
        time.sleep(600)

    def in_native_code(self) -> None:
        ctypes.PyDLL(None).sleep(600)  # PyDLL, unlike CDLL, does not let go of the interpreter

    def stopped(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.often("2")
@pytest.mark.campaign("signals")
@pytest.mark.parametrize("devices", [1, 2])
def test_one_that_hangs_in_an_evaluation_is_told_so_too(devices: int, tmp_path: Path) -> None:
    kept = Dataset(Stuck("asleep"), holdout=0.25).holdout()
    assert kept
    sample = int(kept.original(np.arange(len(kept)))[5])
    evaluation = [
        "data.holdout=0.25",
        "evaluate.every=3",
        f"data.dataset.sample={sample}",
        "backend.timeout=8",
    ]  # its loading process begins, too
    words = [*WORDS, f"devices={devices}", "data.dataset.way=asleep", *evaluation, f"out={tmp_path / 'run'}"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = commands.run(*words, env=env)
    assert ended.returncode == 1, ended.stderr
    (paragraph,) = [line for line in ended.stderr.splitlines() if line.startswith("dtrain: rank")]
    assert "hung after step 3" in paragraph and f"sample {sample} of data.dataset" in paragraph, paragraph
    assert json.loads((tmp_path / "run/failure.json").read_text())["where"].startswith("lifecycle/test_loaders.py:")


@pytest.mark.often("in_native_code-1")
@pytest.mark.campaign("signals")
@pytest.mark.parametrize(("way", "devices"), [("asleep", 2), ("in_native_code", 1), ("stopped", 1)])
def test_a_loading_process_that_hangs_is_told_at_its_own_line_with_its_sample(
    way: str, devices: int, tmp_path: Path
) -> None:
    words = [*WORDS, f"devices={devices}", f"data.dataset.way={way}", f"out={tmp_path / 'run'}"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    ended = commands.run(*words, env=env)
    assert ended.returncode == 1, ended.stderr
    (paragraph,) = [line for line in ended.stderr.splitlines() if line.startswith("dtrain: rank")]
    assert "hung in step" in paragraph
    assert f"sample {SAMPLE} of data.dataset" in paragraph, paragraph
    record = json.loads((tmp_path / "run/failure.json").read_text())
    if way == "stopped":
        assert "which does not answer" in record["where"]
    else:
        assert (
            record["where"].startswith("lifecycle/test_loaders.py:")
            and f"in {way} (loading process " in record["where"]
        )
        assert record["where"] in paragraph
        assert any(f"in {way}" in line for line in record["traceback"].splitlines()), record["traceback"]


def test_a_process_that_begins_when_its_rank_has_ended_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of a short run, whose folder of reports is gone by then."""
    monkeypatch.setenv(environment.REPORTS, str(tmp_path / "gone"))
    monkeypatch.setattr(loaders, "_mine", [])
    before, table = signal.getsignal(REPORT), [0, 0]
    try:
        loaders.answer(table, 0)
        loaders.note(3)
        assert table == [os.getpid(), 4]
    finally:
        signal.signal(REPORT, before)
