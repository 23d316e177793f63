"""No test waits without an end: what waits asks a clock too, and a test over its limit fails while the others go on."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from changed import ROOT

CLOCKS = {"monotonic", "perf_counter", "deadline"}
HANGING = """
import signal
import time

def test_first(): pass
def test_waits(): time.sleep(600)
def test_after_it(): pass
def test_hears_no_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)
def test_last(): pass
"""


def endless(path: Path) -> Iterator[str]:
    """Where a loop sleeps until something happens, and would sleep for ever if it never did."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.While):
            names = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)}
            if "sleep" in names and not names & CLOCKS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_loop_that_sleeps_asks_a_clock() -> None:
    loops = [line for path in sorted((ROOT / "tests").rglob("*.py")) for line in endless(path)]
    assert not loops, "type until(...) of tests/until.py"


@pytest.mark.parametrize("loop", ["while not file.exists():\n    time.sleep(1)", "while True:\n    sleep(0.1)"])
def test_a_loop_without_an_end_is_seen(loop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "bare.py").write_text(loop)
    assert list(endless(tmp_path / "bare.py")) == ["bare.py:1"]


@pytest.mark.timeout(200)
def test_a_test_over_its_limit_fails_with_its_stacks_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    (tmp_path / "conftest.py").write_text("import workers\n\nworkers.END_SECONDS = 1.0\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 2\n")
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }  # of the pytest around it
    path = os.pathsep.join(map(str, (ROOT / "tests", ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "workers"], cwd=tmp_path, timeout=180,
        env={**plain, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert [line.split("::")[1].split()[0] for line in failed] == ["test_waits", "test_hears_no_signal"], done.stdout
    assert "2 failed, 3 passed" in done.stdout
    assert "Timeout (>2.0s) from pytest-timeout" in done.stdout
    assert 'test_hanging.py", line 10 in test_hears_no_signal' in done.stdout
    assert "ended with -6 in this test" in done.stdout
