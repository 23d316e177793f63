"""From the kill of a rank, an agent or the launcher's server to the next step, of a small GPT with a copy in memory after every step.

OMP_NUM_THREADS=1 python tests/bench/recovery.py [--kills 3]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from until import until

sys.path.insert(0, str(Path(__file__).parents[1]))
from killing import family

WORDS = [
    "model.layers=2",
    "model.width=64",
    "model.heads=2",
    "data.sequence=64",
    "batch=8",
    "hook=[]",
    "logger=[]",
    "evaluate.every=0",
    "evaluate.samples=8",
    "steps=4000",
    "log.every=1",
    "devices=2",
    "checkpoint.memory=1",
    "checkpoint.every=50",
]


def rows(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if path.exists()
        else []
    )


def starts(out: Path) -> list[dict[str, Any]]:
    return [event for event in rows(out / "events.jsonl") if event["event"] == "started"]


def seconds(out: Path, command: int, target: str) -> float:
    """Kill one and wait for the first row of a later start."""
    metrics, before = out / "metrics.jsonl", len(starts(out))
    ahead = len(rows(metrics)) + 60
    until(lambda: len(rows(metrics)) >= ahead)
    os.kill(family(command)[target][-1], signal.SIGKILL)
    begin = time.monotonic()
    until(lambda: len(starts(out)) > before, pause=0.002)
    until(lambda: rows(metrics)[-1]["step"] > starts(out)[-1]["step"], pause=0.002)
    return time.monotonic() - begin


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=3)
    for strategy in ("ddp", "fsdp"):
        for target in ("rank", "agent", "server"):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                words = [*WORDS, f"strategy={strategy}", f"out={out}"]
                process = subprocess.Popen(
                    [sys.executable, "-m", "dtrain", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                taken = [seconds(out, process.pid, target) for _ in range(parser.parse_args().kills)]
                process.send_signal(signal.SIGTERM)
                process.wait()
            print(f"{strategy:<6}{target:<8}", *(f"{one:.2f} s" for one in taken), flush=True)
