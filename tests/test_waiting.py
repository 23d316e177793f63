"""Threads sleep while they wait for each other where others compute, and spin where cores are free."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from launching import command

from dtrain import waiting

SAID = """
import os, time
from dtrain import waiting
waiting.watch()
time.sleep(1.0)
cores = len(os.sched_getaffinity(0))
print(waiting.policy(cores, 1, {}).get("OMP_WAIT_POLICY"), waiting.policy(1, 1, {}), waiting.policy(cores, 1, {"GOMP_SPINCOUNT": "1"}))
"""


@pytest.fixture
def busy() -> Iterator[None]:
    """Every core has something else to do."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    yield
    for hog in hogs:
        hog.kill()
        hog.wait()


def test_where_others_compute_threads_sleep_unless_there_is_one_or_the_user_chose(busy: None) -> None:
    said = subprocess.run([sys.executable, "-c", SAID], capture_output=True, text=True, check=True, timeout=300).stdout
    assert said.split(maxsplit=1) == ["PASSIVE", "{} {}\n"]


@pytest.mark.parametrize(("taken", "threads", "ranks", "sleeps"), [(0.1, 4, 1, False), (0.9, 4, 1, True), (0.9, 2, 1, False), (0.9, 2, 2, True)])
def test_what_counts_are_cores_that_our_threads_need(taken: float, threads: int, ranks: int, sleeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(waiting, "_cores", lambda: 4)
    monkeypatch.setattr(waiting, "others", lambda ranks: taken)
    assert bool(waiting.policy(threads, ranks, {})) is sleeps


@pytest.mark.parametrize("words", [[], ["launcher=local"]])
def test_a_run_beside_others_is_told_so(words: list[str], busy: None, tmp_path: object) -> None:
    """The environment of the rank, as its own code sees it."""
    env = {name: value for name, value in os.environ.items() if name not in (*waiting.CHOSEN, "OMP_NUM_THREADS")}
    more = [
        "model._target_=launching.Policy",
        "model.inputs=64",
        "model.outputs=10",
        "trust=[launching]",
        "data=synthetic",
        "objective=regression",
        "steps=2",
        f"out={tmp_path}/a",
    ]
    done = subprocess.run([*command(), *more, *words], capture_output=True, text=True, timeout=300, env={**env, "PYTHONPATH": "tests"})
    assert done.returncode == 0, done.stderr
    assert "policy PASSIVE" in done.stdout + done.stderr
