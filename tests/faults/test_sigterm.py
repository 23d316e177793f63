"""SIGTERM at any moment, with some seconds before SIGKILL: nothing done is lost, and the exit code says so."""

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launching import started, steps_of, wait_for_step
from until import until

from dtrain.checkpoint.commit import candidates, first

pytestmark = pytest.mark.campaign("signals")

GRACE_SECONDS = {"busy": 90.0, "idle": 5.0}
"""Before SIGKILL, on a machine that has other things to do, and on one that has not; the whole run takes longer than either."""
WORDS = [
    "model._target_=launching.Slow",
    "model.rank=0",
    "steps=20000",
    "batch=8",
    "checkpoint.every=7",
    "evaluate.every=5",
]
STRATEGIES = {"single": [], "ddp": ["strategy=ddp", "devices=2"], "fsdp": ["strategy=fsdp", "devices=2"]}


def listening(process: "subprocess.Popen[str]") -> bool:
    """Whether the interpreter has come so far that it can hear SIGTERM: before, nobody can."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def terminated(out: Path, seconds: float, *words: str, steps: int | None, grace: float) -> tuple[int, str]:
    """The exit code and the output of a command that gets SIGTERM so many seconds after it could hear it, or after `steps` steps, and SIGKILL after the grace."""
    process = started(out, *WORDS, *words)
    until(lambda: listening(process), pause=0.005)
    if steps is not None:
        wait_for_step(out, steps)
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    try:
        output, _ = process.communicate(timeout=grace)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"SIGTERM after {seconds:.2f} s: it still ran {grace} s later\n{output}") from None
    return process.returncode, output


def campaign(out: Path, words: list[str], times: int, seed: int, *, machine: str) -> int:
    """The same run, ended again and again. How many of the starts had something new to save, and saved it."""
    draw, saved = random.Random(seed), 0
    for number in range(times):
        before, _ = first(candidates(str(out)))
        steps = number % 2 and (before[1]["step"] if before else 0) + 1  # every other one trains
        seconds = draw.uniform(0, 1.0 if steps else 3.0)
        code, output = terminated(out, seconds, *words, steps=steps or None, grace=GRACE_SECONDS[machine])
        said = f"SIGTERM after {seconds:.2f} s\n{output}"
        assert code == 75, said
        assert "Traceback" not in output, said
        after, damaged = first(candidates(str(out)))
        assert not damaged, said
        done = steps_of(out)[-1:] if (out / "metrics.jsonl").exists() else []
        assert (after[1]["step"] if after else 0) == (done[0] if done else 0), said
        saved += after is not None and (before is None or after[1]["step"] > before[1]["step"])
        assert not steps or (after and after[1]["step"] >= steps), said
        assert not (out / "failure.json").exists(), said
    if (out / "metrics.jsonl").exists():
        steps = steps_of(out)
        assert steps == list(range(1, len(steps) + 1)), "a row is lost, or there twice"
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        assert [event for event in events if event["event"] == "failed"] == []
    return saved


@pytest.mark.often("fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sigterm_at_any_moment_saves_and_says_75(strategy: str, tmp_path: Path) -> None:
    campaign(tmp_path / "out", STRATEGIES[strategy], 4, seed=len(strategy), machine="busy")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sigterm_a_hundred_times(strategy: str, tmp_path: Path) -> None:
    assert campaign(tmp_path / "out", STRATEGIES[strategy], 68, seed=7, machine="idle") >= 34
