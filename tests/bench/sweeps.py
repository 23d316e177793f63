"""What a job of a sweep costs, beside a bare forked torch loop and a process of its own.

    OMP_NUM_THREADS=1 python tests/bench/sweeps.py [--jobs 300] [--rounds 3]

CPU seconds are of all processes: the command, the process that forks, and the jobs.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

WORDS = ["model=mlp", "data=synthetic", "objective=regression", "steps=20"]
BARE = """
import os, sys, torch
from torch import nn
torch.set_num_threads(1)
import torch._dynamo
def job(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    optim = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(20):
        x, y = torch.randn(8, 64), torch.randn(8, 10)
        nn.functional.mse_loss(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optim.step(); optim.zero_grad()
running = 0
for seed in range(int(sys.argv[1])):
    if not os.fork():
        job(seed); os._exit(0)
    running += 1
    if running > os.cpu_count():
        os.wait(); running -= 1
for _ in range(running):
    os.wait()
"""


def measured(*command: str, place: Path) -> tuple[float, float]:
    """Wall and CPU seconds of a command and all its processes."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=place, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    rows: dict[str, list[tuple[float, float]]] = {
        "a sweep": [],
        "bare forked loops": [],
        "processes of their own (4)": [],
    }
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory() as folder:
            place, sweep = Path(folder), ["-m", "dtrain", "-m", *WORDS, f"seed=range(0,{asked.jobs})", "sweep.out=s"]
            for name, count, commands in (
                ("a sweep", asked.jobs, [sweep]),
                ("bare forked loops", asked.jobs, [["-c", BARE, str(asked.jobs)]]),
                (
                    "processes of their own (4)",
                    4,
                    [["-m", "dtrain", *WORDS, f"seed={seed}", f"out=r{seed}"] for seed in range(4)],
                ),
            ):
                both = [measured(*command, place=place) for command in commands]
                rows[name].append((sum(wall for wall, _ in both) / count, sum(cpu for _, cpu in both) / count))
            again = measured(*sweep, place=place)
            print(f"round {number}: the finished sweep asked again {again[0]:.1f} s, {again[1]:.1f} CPU s", flush=True)
    for name, taken in rows.items():
        wall, cpu = (statistics.median(each) for each in zip(*taken, strict=True))
        print(
            f"| {name} | {60 / wall:.0f} | {1e3 * cpu:.0f} ({1e3 * min(c for _, c in taken):.0f}..{1e3 * max(c for _, c in taken):.0f}) |"
        )


if __name__ == "__main__":
    main()
