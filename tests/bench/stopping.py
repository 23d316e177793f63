"""Stopping early on a real grid, and a population against a random search of equal steps.

    OMP_NUM_THREADS=1 python tests/bench/stopping.py --text tinyshakespeare.txt [--seeds 5] [--steps 256] [--rules halving median]

A small GPT learns characters: 8 learning rates x 2 widths x 2 lengths of the warm-up x 2 seeds are run to their end once,
and then with rules; a population of 12 and the random search that draws the same 12 begin are run with several
seeds of the sweep.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

GPT = ["model.layers=2", "model.heads=2", "data.sequence=32", "batch=12", "hook=[]", "logger=[]"]
GRID = ["optim.lr=3e-4,1e-3,2e-3,4e-3,8e-3,1.6e-2,3e-2,1e-1", "model.width=32,64", "schedule.warmup=0,0.1", "seed=0,1"]
RANDOM = ["model.width=32", "optim.lr=tag(log,interval(1e-4,1e-1))", "optim.weight_decay=tag(log,interval(1e-3,1))"]


def run(place: Path, out: str, *words: str) -> float:
    """CPU seconds of a sweep."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "dtrain", "-m", *words, f"sweep.out={out}"],
        cwd=place,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def losses(job: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in map(json.loads, (job / "metrics.jsonl").read_text().splitlines())}


def finished(root: Path) -> dict[str, float]:
    """Job -> the held-out loss of each that ran to its end."""
    results = {path.parent.name: json.loads(path.read_text()) for path in root.glob("*/result.json")}
    return {name: result["metrics"]["eval_loss"] for name, result in results.items() if result["status"] == "finished"}


def steps(root: Path) -> int:
    return sum(len(losses(path.parent)) for path in root.glob("*/metrics.jsonl"))


def grid(place: Path, words: list[str], rules: list[str]) -> None:
    cpu = {"none": run(place, "none", *words, *GRID)}
    ended, whole = finished(place / "none"), steps(place / "none")
    ranked = sorted(ended, key=lambda name: ended[name])
    print(
        f"none: {len(ended)} jobs, {whole} steps, best {ended[ranked[0]]:.4f} {ranked[0]}, CPU {cpu['none']:.0f} s",
        flush=True,
    )
    for rule in rules:
        cpu[rule] = run(place, rule, *words, *GRID, f"sweep.stop={rule}")
        root, best = place / rule, finished(place / rule)
        name = min(best, key=lambda name: best[name])
        alone = {path.name: losses(place / "none" / path.name) for path in root.iterdir() if path.is_dir()}
        same = sum(
            losses(root / job) == {step: loss for step, loss in rows.items() if step <= max(losses(root / job))}
            for job, rows in alone.items()
        )
        print(
            f"{rule}: best {best[name]:.4f} {name}, place {ranked.index(name) + 1} of {len(ranked)}; "
            f"{steps(root) / whole:.3f} of the steps, {cpu[rule] / cpu['none']:.2f} of the CPU time; {len(best)} finished; "
            f"losses of {same} of {len(alone)} jobs are bit for bit those of the uninterrupted ones",
            flush=True,
        )


def population(place: Path, words: list[str], seeds: int) -> None:
    pairs = []
    for seed in range(seeds):
        common = [*words, *RANDOM, "sweep.search=random", "sweep.trials=12", f"sweep.seed={seed}"]
        run(place, f"random-{seed}", *common)
        run(place, f"population-{seed}", *common, "sweep.stop=population")
        both = [place / f"{name}-{seed}" for name in ("random", "population")]
        pair = [min(finished(root).values()) for root in both]
        pairs.append(pair)
        print(
            f"seed {seed}: best of random {pair[0]:.4f}, of the population {pair[1]:.4f}; steps {[*map(steps, both)]}",
            flush=True,
        )
    print("median", [round(statistics.median(side), 4) for side in zip(*pairs, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--rules", nargs="*", default=["halving"], choices=["halving", "median"])
    parser.add_argument("--only", choices=["grid", "population"])
    asked = parser.parse_args()
    words = [*GPT, f"data.path={Path(asked.text).resolve()}", f"steps={asked.steps}", "evaluate.every=0"]
    with tempfile.TemporaryDirectory() as folder:
        if asked.only != "population":
            grid(Path(folder), words, asked.rules)
        if asked.only != "grid":
            population(Path(folder), words, asked.seeds)


if __name__ == "__main__":
    main()
