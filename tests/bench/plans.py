"""Plans per second of one core, and the wall time of a cold `dtrain plan`, for RESULTS.md.

python tests/bench/plans.py [--seconds 5]

Composing and resolving is counted in CPU time of this process, which holds no torch; a cold plan is a whole process, with its predictions.
"""

import argparse
import itertools
import resource
import statistics
import subprocess
import sys
import time

from dtrain.cluster import Cluster
from dtrain.compose import compose
from dtrain.resolve import resolve

LARGE = "model.layers=80 model.width=8192 model.heads=64 data.sequence=8192 strategy=fsdp mesh.tp=8 batch=4096 precision=bf16 cluster=h100x8"
WORDS = (
    "",
    "optim.lr=3e-3 steps=20 batch=8",
    "strategy=fsdp nodes=2 devices=2 strategy.reshard=never",
    "mesh.pp=2 devices=4 mesh.tp=2 pipeline.schedule=gpipe accumulate=4",
    "model=moe model.experts=4 mesh.ep=2 devices=2 optim=sgd",
    "model=mlp data=synthetic objective=regression precision=bf16 schedule=wsd",
    "recipe=shakespeare steps=10 model.tied=false",
    "recipe=digits optim.lr=1e-3",
    f"{LARGE} nodes=128",
)
COLD = ("plan", f"plan {LARGE} nodes=128", f"plan {LARGE} nodes=2048")


def rate(words: list[str], seconds: float) -> float:
    """Plans per second of CPU time."""
    cluster, began = Cluster(gpus=0, cpus=8), time.process_time()
    for count in itertools.count(1):
        resolve(compose(words), cluster)
        if (spent := time.process_time() - began) > seconds:
            return count / spent
    raise AssertionError


def cold(words: list[str]) -> tuple[float, float, float]:
    """Wall and CPU seconds, and peak MiB, of one process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "dtrain", *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        time.perf_counter() - began,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        after.ru_maxrss / 1024,
    )


def main(seconds: float) -> None:
    print("| words | plans a second of one core |\n|---|---|")
    for words in WORDS:
        print(f"| `{words}` | {rate(words.split(), seconds):.0f} |", flush=True)
    assert "torch" not in sys.modules
    print("\n| command | wall s, median (min..max) | CPU s | peak MiB |\n|---|---|---|---|")
    for words in COLD:
        wall, cpu, peak = zip(*(cold(words.split()) for _ in range(7)), strict=True)
        print(
            f"| `{words}` | {statistics.median(wall):.2f} ({min(wall):.2f}..{max(wall):.2f}) | {statistics.median(cpu):.2f} | {max(peak):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5)
    main(parser.parse_args().seconds)
