"""What a result says beside its figures: which code made it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dtrain
from dtrain import result
from dtrain.config import environment


def git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv(environment.CODE, "of an earlier run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commit_of_the_folder_is_told_and_whether_it_was_changed(folder: Path) -> None:
    git("init", "-q")
    (folder / "a.py").write_text("1")
    git("add", "-A")
    git("commit", "-qm", "one")
    result.note_code()
    commit = git("rev-parse", "--short=12", "HEAD")
    assert result.versions()["code"] == commit
    (folder / "a.py").write_text("2")
    result.note_code()
    assert result.versions()["code"] == f"{commit}-dirty"


def test_nothing_that_the_folder_brings_is_run(folder: Path) -> None:
    git("init", "-q")
    (folder / "a.py").write_text("1")
    git("add", "-A")
    git("commit", "-qm", "one")
    monitor = folder / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {folder}/ran\n")
    monitor.chmod(0o755)
    for hook in (".git/hooks/post-index-change", ".git/hooks/post-checkout"):
        (folder / hook).write_text(monitor.read_text())
        (folder / hook).chmod(0o755)
    git("config", "core.fsmonitor", str(monitor))
    os.utime(folder / "a.py", (1, 1))
    result.note_code()
    assert "code" in result.versions() and not (folder / "ran").exists()


def test_a_folder_without_git_says_nothing(folder: Path) -> None:
    result.note_code()
    assert "code" not in result.versions()


def test_the_source_of_dtrain_has_one_digest_wherever_it_is_found(folder: Path) -> None:
    code = "from dtrain import result; print(result.source_digest('dtrain'), result.source_digest('own'))"
    (folder / "own.py").write_text("x = 1")
    elsewhere = {**os.environ, "PYTHONPATH": str(Path(dtrain.__file__).parents[1])}
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    first, second = (
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.split()
        for env in (elsewhere, own)
    )
    assert len(first) == 2 and first[1] == second[1]
    assert all(map(len, first + second))
