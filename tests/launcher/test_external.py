"""Ranks that torchrun started."""

import os
import subprocess
import sys
from pathlib import Path

from launching import WORDS, steps_of


def torchrun(*words: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dtrain", *WORDS, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=env, check=False)


def test_the_ranks_that_are_there_are_used(tmp_path: Path) -> None:
    done = torchrun("model=mlp", f"out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "external (auto: RANK and WORLD_SIZE are set)" in done.stdout
    assert steps_of(tmp_path) == list(range(1, 13))


def test_wrong_words_are_told_once(tmp_path: Path) -> None:
    done = torchrun("model=mlp", f"out={tmp_path}", "launcher=external", "devices=3")
    assert done.returncode != 0
    assert done.stderr.count("started as one of 2 ranks") == 1


def test_without_ranks_it_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "dtrain", "launcher=external"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "torchrun" in done.stderr
