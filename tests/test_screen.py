"""Whoever reads the output may go; the run goes on, and says nothing of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("ranks", ["", "strategy=ddp devices=2"])
def test_a_run_outlives_who_reads_it(tmp_path: Path, ranks: str) -> None:
    words = f"{sys.executable} -m dtrain model=mlp data=synthetic steps=20 batch=4 out={tmp_path} {ranks}".split()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as run:
        assert run.stdout and run.stderr
        assert run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == ""
        assert run.wait(timeout=60) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", 20)
    assert "logger_failed" not in (tmp_path / "events.jsonl").read_text()


def test_a_plan_that_nobody_reads_on_ends_in_silence(tmp_path: Path) -> None:
    words = f"{sys.executable} -m dtrain plan why".split()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as run:
        assert run.stdout and run.stderr
        run.stdout.close()
        assert (run.stderr.read(), run.wait(timeout=60)) == ("", 0)
