"""Time per step of the default run by how its threads wait for each other, on free cores and beside two busy processes, in turns.

python tests/bench/waiting.py [rounds] [steps]      # GOMP_SPINCOUNT=300000 is what OpenMP does where nobody says anything
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

POLICIES = {"dtrain chooses": {}, "spin": {"GOMP_SPINCOUNT": "300000"}, "sleep": {"OMP_WAIT_POLICY": "PASSIVE"}}
WORDS = ("evaluate.every=100000", "checkpoint.every=100000", "hook=[]", "logger=[]")


def median_step(steps: int, policy: dict[str, str]) -> float:
    """Seconds of the median step of a run."""
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    with tempfile.TemporaryDirectory() as out:
        words = [f"out={out}/run", f"steps={steps}", *WORDS]
        subprocess.run([sys.executable, "-m", "dtrain", *words], env=env | policy, check=True, capture_output=True, timeout=600)
        rows = Path(out, "run/metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(row)["step_seconds"] for row in rows)


def measure(rounds: int, steps: int, busy: int) -> None:
    """Print the policies' median steps over those of `spin`, with the smallest and largest of the rounds, beside `busy` processes."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        seconds = [{name: median_step(steps, policy) for name, policy in POLICIES.items()} for _ in range(rounds)]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    for name in POLICIES:
        ratios = [each[name] / each["spin"] for each in seconds]
        middle = statistics.median(each[name] for each in seconds)
        print(
            f"{busy} busy  {name:15s} {middle * 1e3:8.1f} ms  {statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f}) of spin",
            flush=True,
        )


if __name__ == "__main__":
    chosen = [int(word) for word in sys.argv[1:]]
    for others in (0, 2):
        measure(*[*chosen, *(3, 60)[len(chosen) :]][:2], others)
