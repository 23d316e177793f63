"""Time per step of the default run beside a loop written by hand, and by how threads wait for each other: on free cores, beside two busy processes, in turns.

python tests/bench/waiting.py [rounds] [steps]

hand            the usual loop in a process of its own: the same model and batch, fused AdamW, clip, random pieces of one text
dtrain          the default run
dtrain, spin    with GOMP_SPINCOUNT=300000, what OpenMP does where nobody says anything
dtrain, sleep   with OMP_WAIT_POLICY=PASSIVE
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HAND = """
import sys, time, torch, torch.nn.functional as F
from dtrain.model.gpt import GPT
torch.manual_seed(0)
model = GPT(vocab=256, layers=4, heads=4, width=128)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
text = torch.frombuffer(bytearray(open(F.__file__, "rb").read()), dtype=torch.uint8).long()
ends = [time.perf_counter()]
for step in range(int(sys.argv[1])):
    at = torch.randint(len(text) - 65, (8,)).tolist()
    x, y = torch.stack([text[i : i + 64] for i in at]), torch.stack([text[i + 1 : i + 65] for i in at])
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    ends.append(time.perf_counter())
print([after - before for before, after in zip(ends, ends[1:])])
"""
WORDS = ("evaluate.every=100000", "checkpoint.every=100000", "hook=[]", "logger=[]")
SYSTEMS = {
    "hand": {},
    "dtrain": {},
    "dtrain, spin": {"GOMP_SPINCOUNT": "300000"},
    "dtrain, sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def median_step(system: str, steps: int) -> float:
    """Seconds of the median step of a fresh process, without the first ten."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    } | SYSTEMS[system]
    with tempfile.TemporaryDirectory() as out:
        command = (
            ["-c", HAND, str(steps)]
            if system == "hand"
            else ["-m", "dtrain", f"out={out}/run", f"steps={steps}", *WORDS]
        )
        said = subprocess.run(
            [sys.executable, *command], env=env, check=True, capture_output=True, text=True, timeout=600
        ).stdout
        rows = [] if system == "hand" else Path(out, "run/metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(row)["step_seconds"] for row in rows] or json.loads(said)
    return statistics.median(seconds[10:])


def measure(rounds: int, steps: int, busy: int) -> None:
    """Print the systems' median steps over that of `hand`, with the smallest and largest of the rounds, beside `busy` processes."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        seconds = [{name: median_step(name, steps) for name in SYSTEMS} for _ in range(rounds)]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    for name in SYSTEMS:
        ratios = [each[name] / each["hand"] for each in seconds]
        middle = statistics.median(each[name] for each in seconds)
        print(
            f"{busy} busy  {name:15s} {middle * 1e3:8.1f} ms  {statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f}) of hand",
            flush=True,
        )


if __name__ == "__main__":
    chosen = [int(word) for word in sys.argv[1:]]
    for others in (0, 2):
        measure(*[*chosen, *(5, 100)[len(chosen) :]][:2], others)
