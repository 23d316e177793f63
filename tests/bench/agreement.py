"""What the agreement on reached parameters, one sum of four bytes, adds to a step of ddp on two ranks.

    OMP_NUM_THREADS=1 python tests/bench/agreement.py [--rounds 5] [--only gpt]

The models and the clock of tests/bench/ranks.py. One run of dtrain a model, every other step without the sum (with, without, without, with).
Printed: the medians of step time on the slower rank and of CPU time of both ranks, with and without, and over the rounds the median (smallest..largest)
of the ratio with / without: of the 10th percentile of step time, of its median, of the median step's CPU time of both ranks. Last, on its own, what
200 such sums in a row take when both ranks stand at a barrier before: the cost without the wait for the slower rank.
"""

import argparse
import contextlib
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from pool import ranks as forked
from ranks import TASKS, WORLD, Task
from torch.optim.optimizer import register_optimizer_step_post_hook

from dtrain.backend.gloo import Gloo
from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.loop import agreement
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.train import train

Turn = list[tuple[float, float]]
WAYS = {"with": dist, "without": SimpleNamespace(all_reduce=lambda *_: None)}


def race(plan: Plan) -> tuple[dict[str, Turn], float]:
    """One rank: (seconds, CPU seconds) of every step, and seconds of one sum."""
    found: dict[str, Turn] = {name: [] for name in WAYS}
    order = itertools.cycle(["with", "without", "without", "with"])
    running, before = "", (0.0, 0.0)

    def tick(*_: object) -> None:
        nonlocal running, before
        now = time.perf_counter(), time.process_time()
        if running:
            found[running].append((now[0] - before[0], now[1] - before[1]))
        running = next(order)
        agreement.dist = WAYS[running]  # type: ignore[assignment]
        before = time.perf_counter(), time.process_time()

    with Gloo(timeout=600).open():
        handle = register_optimizer_step_post_hook(tick)
        with contextlib.redirect_stdout(io.StringIO()):
            train(replace(plan, backend={"_target_": "ranks.Standing", "timeout": 600}))
        handle.remove()
        number, many = torch.zeros(()), 200
        dist.barrier()
        began = time.perf_counter()
        for _ in range(many):
            dist.all_reduce(number)
        return found, (time.perf_counter() - began) / many


def measure(kind: str, task: Task, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as out:
        words = [
            *task.words, "data=dataset", "trust=[ranks]", "strategy=ddp", f"devices={WORLD}", f"batch={task.batch * WORLD}", f"out={out}",
            f"steps={2 * (rounds + 1) * task.turn + 1}", "evaluate.every=0", "checkpoint.every=0", "logger=[]", "hook=[]",
        ]  # fmt: skip
        answers = forked(WORLD, race, resolve(compose(words), detect()), seconds=1800)
    parts = [slice(index * task.turn, (index + 1) * task.turn) for index in range(1, rounds + 1)]
    rows = {name: [_figures([found[name][part] for found, _ in answers]) for part in parts] for name in WAYS}
    cells = [f"{statistics.median(row[which] for row in rows[name]) * 1e6:7.0f}" for which in (1, 2) for name in WAYS]
    for which in range(3):
        ratios = [a[which] / b[which] for a, b in zip(rows["with"], rows["without"], strict=True)]
        cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})")
    print(f"{kind:<6} {'  '.join(cells)}   {max(alone for _, alone in answers) * 1e6:.0f}")


def _figures(turn: list[Turn]) -> tuple[float, float, float]:
    walls = [sorted(seconds for seconds, _ in steps) for steps in turn]
    return (
        max(each[len(each) // 10] for each in walls),
        max(statistics.median(each) for each in walls),
        sum(statistics.median(cpu for _, cpu in steps) for steps in turn),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="mlp or gpt")
    options = parser.parse_args()
    print("model  us with  without  CPU us with  without  p10 ratio  median ratio  CPU ratio  us alone")
    for kind, task in TASKS.items():
        if options.only in kind:
            measure(kind, task, options.rounds)
