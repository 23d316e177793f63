"""Modules of a user that do, when they are imported, what no fork survives: the run goes on, and says which it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Forked
from launching import free_port, steps_of

CUDA = """
import os
import torch

def _bad(here=os.getpid()):
    return os.getpid() != here

torch.cuda._is_in_bad_fork = _bad  # as it answers in a build for CUDA, once somebody has asked for GPUs

class Net(torch.nn.Linear):
    def __init__(self):
        assert not torch.cuda._is_in_bad_fork(), "Cannot re-initialize CUDA in forked subprocess"
        super().__init__(64, 10)
"""
THREAD = """
import queue, threading
import torch

asked, answered = queue.Queue(), queue.Queue()

def work():
    while True:
        answered.put(asked.get())

threading.Thread(target=work, daemon=True).start()

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
        asked.put(1)
        answered.get(timeout=60)
"""
MOVES = """
import os
import torch

os.chdir({folder!r})

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
"""
WORDS = (
    "data=synthetic",
    "data.samples=512",
    "objective=regression",
    "steps=4",
    "log.every=1",
    "logger=[]",
    "batch=8",
    "model._target_=mine.Net",
    "trust=[mine]",
)


def begun(folder: Path, *words: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": str(folder)}
    start = Forked if words[0] == "dtrain" else subprocess.Popen
    return start(
        [sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=folder
    )


@pytest.mark.often("*starts CUDA", others=pytest.mark.campaign("commands"))
@pytest.mark.parametrize(("source", "deed"), [(CUDA, "starts CUDA"), (THREAD, "starts a thread")])
def test_each_rank_imports_what_no_fork_survives(source: str, deed: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source)
    run = begun(tmp_path, "dtrain", *WORDS, "devices=2", "out=run")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    assert output.count(f"mine {deed}") == 1
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]


@pytest.mark.campaign("network")
def test_a_node_of_another_host_does_so_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CUDA)
    address = f"127.0.0.1:{free_port()}"
    run = begun(
        tmp_path,
        "dtrain",
        *WORDS,
        "nodes=2",
        "devices=1",
        "out=run",
        "launcher=local",
        f"launcher.address={address}",
        "launcher.here=1",
    )
    other = begun(tmp_path, "dtrain.launcher.local.agent", address)
    said = [each.communicate(timeout=300)[0] for each in (run, other)]
    assert (run.returncode, other.returncode) == (0, 0), said
    assert [text.count("mine starts CUDA") for text in said] == [1, 1]
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]


def test_a_module_that_ends_the_process_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit(3)")
    run = begun(tmp_path, "dtrain", *WORDS, "devices=2", "out=run")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 2
    assert "importing mine" in output.lower() and "Traceback" not in output, output


def test_a_module_that_cannot_be_imported_is_told_by_a_rank(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise ValueError('planned')")
    run = begun(tmp_path, "dtrain", *WORDS, "devices=2", "out=run")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 1
    assert "dtrain: rank 0 failed" in output or "dtrain: rank 1 failed" in output
    assert output.count("Traceback (most recent call last)") == 1


def test_a_module_that_changes_the_folder_does_not_move_the_run(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.py").write_text(MOVES.format(folder=str(tmp_path / "elsewhere")))
    run = begun(tmp_path, "dtrain", *WORDS, "devices=2", "out=run")
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    assert not any((tmp_path / "elsewhere").iterdir())
