"""What a checkpoint every 10 steps costs a small GPT, beside none: the same run in turns, its steps and the stalls of its saves.

OMP_NUM_THREADS=1 python tests/bench/saving.py [--rounds 7]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, WARM = 100, 20
WORDS = (
    f"model.layers=4 model.width=128 model.heads=4 data.sequence=128 batch=4 hook=[] logger=[] evaluate.every=0 evaluate.samples=8 steps={STEPS} "
    "strategy=single"
).split()


def seconds(every: int) -> float:
    """Of the steps after the warm-up, with what saves made the loop wait."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*WORDS, f"checkpoint.every={every}", f"out={folder}/run"]
        subprocess.run([sys.executable, "-m", "dtrain", *words], check=True, capture_output=True)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in Path(folder, "run", "events.jsonl").read_text().splitlines()]
    stalls = sum(
        event["stall_seconds"] for event in events if event["event"] == "committed" and WARM < event["step"] < STEPS
    )
    return sum(row["step_seconds"] for row in rows[WARM:]) + stalls


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    ratios = []
    for number in range(parser.parse_args().rounds):
        order = (0, 10) if number % 2 else (10, 0)
        taken = {every: seconds(every) for every in order}
        ratios.append(taken[10] / taken[0])
    print(f"every 10 steps against none: {statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})")
