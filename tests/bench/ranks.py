"""What a step of dtrain costs on two ranks, beside loops written by hand with the same strategy.

    OMP_NUM_THREADS=1 python tests/bench/ranks.py [--rounds 10] [--only ddp-mlp] [--profile dtrain]

MLP 64-128-128-128-10, 16 samples a rank, and a GPT, 4 layers x 128, 2 sequences of 128 a rank; AdamW, clip 1.0, one thread a rank, gloo. All systems
live side by side in the same two processes and the same process group, begin with the same weights, and take turns, in rotated order: the hook
after dtrain's optimizer step lets the others go on, off the clock. The clock is the optimizer's post-step hook in all of them. Printed per system:
the median over the rounds of the ratio to `usual` of the same round, for the 10th percentile of step time (of the slower rank), for CPU time
per step (of both ranks), all of it and its median step; and the loss over the last turn, as proof that all do the same: `strong` and dtrain see the same samples, their losses agree to three digits.

usual    DistributedDataParallel or fully_shard per block and root, DataLoader with DistributedSampler, default AdamW, clip_grad_norm_
strong   the best loop by hand: batches gathered by index, fused AdamW (foreach where parameters are sharded), gradients as bucket views
dtrain   `train` of a plan with all defaults on: rows, TensorBoard, console, checkpoints, evaluation, signals. All of its CPU time holds what
         the others do not do: evaluations and checkpoints every 200 steps
"""

import argparse
import contextlib
import cProfile
import io
import itertools
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import torch._dynamo  # the first optimizer would import it, in every rank
import torch.distributed as dist
import torch.nn.functional as F
from pool import ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dtrain.backend.gloo import Gloo
from dtrain.cluster import detect
from dtrain.compose import compose
from dtrain.data.dataset import Dataset
from dtrain.data.order import samples
from dtrain.model import blocks
from dtrain.model.gpt import GPT
from dtrain.model.mlp import MLP
from dtrain.model.seeds import derive, fill
from dtrain.planned import Plan
from dtrain.resolve import resolve
from dtrain.train import train

WORLD, SETTLE, LR = 2, 5, 1e-3
"""Ranks; steps at the beginning of a turn that do not count."""


class Rows:
    """20,000 samples of 64 numbers, and which of ten classes they are."""

    def __new__(cls) -> TensorDataset:  # type: ignore[misc]
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(20_000, 64, generator=draw)
        return TensorDataset(x, (x @ torch.randn(64, 10, generator=draw)).argmax(1))


class Phrases:
    """8,000 sequences of 128 tokens, a phrase of seven each, and what comes next."""

    def __new__(cls) -> TensorDataset:  # type: ignore[misc]
        phrases = torch.randint(256, (8_000, 7), generator=torch.Generator().manual_seed(0))
        tokens = phrases[:, torch.arange(129) % 7]
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@dataclass(frozen=True)
class Task:
    data: Callable[[], TensorDataset]
    model: Callable[[], nn.Module]
    batch: int
    """Of one rank."""
    turn: int
    """Steps between two changes of who runs."""
    words: tuple[str, ...]


TASKS = {
    "mlp": Task(
        Rows, lambda: MLP(inputs=64, outputs=10, width=128, layers=3), 16, 200, ("model=mlp", "data.dataset._target_=ranks.Rows", "objective=classification"),
    ),
    "gpt": Task(
        Phrases, lambda: GPT(vocab=256, layers=4, heads=4, width=128), 2, 25,
        ("model=gpt", "data.dataset._target_=ranks.Phrases", "data.outputs=256", "objective=next_token"),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Standing:
    """The Backend of a process group that is there already."""

    timeout: float = 600

    def open(self) -> AbstractContextManager[None]:
        return nullcontext()


def wrap(model: nn.Module, strategy: str, strong: bool) -> nn.Module:
    if strategy == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=strong)
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loaded(data: TensorDataset, batch: int) -> Iterator[list[Tensor]]:
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=batch, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def gathered(data: TensorDataset, batch: int, steps: int) -> Iterator[list[Tensor]]:
    """The samples of dtrain's run in its order, listed beforehand."""
    numbers = Dataset(TensorDataset(torch.arange(len(data)), torch.zeros(len(data))))
    listed = numbers.take(*samples(np.arange(steps * WORLD * batch), n=len(numbers), seed=derive(0, "data")))["inputs"]
    for index in listed.view(steps, WORLD, batch)[:, dist.get_rank()]:
        yield [tensor[index] for tensor in data.tensors]


def by_hand(task: Task, strategy: str, strong: bool, steps: int, losses: list[Tensor]) -> Iterator[None]:
    """A loop that stops after every step until it is asked for the next."""
    model = task.model()
    fill(model, 0)
    wrapped = wrap(model, strategy, strong)
    kernel = {"fused" if strategy == "ddp" else "foreach": True} if strong else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **kernel)
    data = task.data()
    for x, y in gathered(data, task.batch, steps) if strong else loaded(data, task.batch):
        outputs = wrapped(x)
        loss = F.cross_entropy(outputs.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True if strong else None)
        optimizer.step()
        losses.append(loss.detach())
        yield


class Turns:
    """Who runs, and what it cost: `found[name]` has (seconds, CPU seconds) of every step of every turn."""

    def __init__(self, others: dict[str, Iterator[None]], steps: int, profiled: str | None) -> None:
        self.found: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in ("dtrain", *others)}
        self.profile = cProfile.Profile()
        self._others, self._steps, self._profiled = others, steps, profiled
        self._running = "dtrain"
        self._ticks: list[tuple[float, float]] = []

    def tick(self, *_: object) -> None:
        self._ticks.append((time.perf_counter(), time.process_time()))
        if self._running == "dtrain" and len(self._ticks) == self._steps + 1:
            self._change()

    def _change(self) -> None:
        """dtrain's turn is over: that of the others, then its next one."""
        self._stop()
        names = list(self._others)
        shift = len(self.found["dtrain"]) % len(names)
        with torch.enable_grad():  # an optimizer may hold its hooks without
            for name in names[shift:] + names[:shift]:
                self._start(name)
                for _ in range(self._steps):
                    next(self._others[name])
                self._stop()
        self._start("dtrain")

    def _start(self, name: str) -> None:
        self._running, self._ticks = name, []
        dist.barrier()
        if name == self._profiled and len(self.found[name]) > 1:
            self.profile.enable()
        self._ticks.append((time.perf_counter(), time.process_time()))

    def _stop(self) -> None:
        if self._running == self._profiled:
            self.profile.disable()
        self.found[self._running].append(
            [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(self._ticks)][SETTLE:]
        )


def race(plan: Plan, task: Task, strategy: str, profiled: str | None) -> dict[str, Any]:
    """One rank: all systems, to the end of dtrain's plan."""
    losses: dict[str, list[Tensor]] = {"usual": [], "strong": []}
    with Gloo(timeout=600).open():
        others = {name: by_hand(task, strategy, name == "strong", plan.steps, losses[name]) for name in losses}
        for other in others.values():  # makes DDP's buckets, FSDP's groups and the state of the optimizer
            next(other)
        turns = Turns(others, task.turn, profiled)
        handle = register_optimizer_step_post_hook(turns.tick)
        with contextlib.redirect_stdout(io.StringIO()):
            train(replace(plan, backend={"_target_": "ranks.Standing", "timeout": 600}))
        handle.remove()
        means = torch.stack([torch.stack(values[-task.turn :]).mean() for values in losses.values()])
        dist.all_reduce(means)
    told = io.StringIO()
    if profiled:
        pstats.Stats(turns.profile, stream=told).sort_stats("tottime").print_stats(45)
    return {
        "found": turns.found,
        "losses": dict(zip(losses, (means / WORLD).tolist(), strict=True)),
        "profile": told.getvalue(),
    }


def measure(strategy: str, task: Task, rounds: int, profiled: str | None) -> None:
    with tempfile.TemporaryDirectory() as out:
        words = [
            *task.words, "data=dataset", "trust=[ranks]", f"strategy={strategy}", f"devices={WORLD}", f"batch={task.batch * WORLD}",
            f"steps={(rounds + 1) * task.turn + 1}", f"out={out}", f"optim.lr={LR}", "optim.betas=[0.9,0.999]", "optim.weight_decay=0.01",
            "schedule=constant", "schedule.warmup=0",
        ]  # fmt: skip
        answers = ranks(WORLD, race, resolve(compose(words), detect()), task, strategy, profiled, seconds=3600)
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    losses = {**answers[0]["losses"], "dtrain": statistics.fmean(row["loss"] for row in rows[-task.turn :])}
    figures = {
        name: [_figures([answer["found"][name][turn] for answer in answers]) for turn in range(1, rounds + 1)]
        for name in ("usual", "strong", "dtrain")
    }
    for name, found in figures.items():
        cells = []
        for which in range(3):
            ratios = [mine[which] / base[which] for mine, base in zip(found, figures["usual"], strict=True)]
            middle = statistics.median(each[which] for each in found) * 1e6
            cells.append(f"{middle:7.0f}  {statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})")
        print(f"{name:<8} {'    '.join(cells)}    {losses[name]:.4f}")
    print(answers[0]["profile"], end="")


def _figures(turn: list[list[tuple[float, float]]]) -> tuple[float, float, float]:
    """Of one turn on all ranks: p10 of step time on the slowest, CPU time per step of all together, and of its median step."""
    p10 = max(sorted(seconds for seconds, _ in steps)[len(steps) // 10] for steps in turn)
    return (
        p10,
        sum(statistics.fmean(cpu for _, cpu in steps) for steps in turn),
        sum(statistics.median(cpu for _, cpu in steps) for steps in turn),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="", help="such as ddp or fsdp-mlp")
    parser.add_argument("--profile", choices=("usual", "strong", "dtrain"))
    options = parser.parse_args()
    for strategy, (kind, task) in itertools.product(("ddp", "fsdp"), TASKS.items()):
        if options.only in f"{strategy}-{kind}":
            print(
                f"{strategy}-{kind}  p10 us   ratio (min..max)      all CPU us   ratio (min..max)   median CPU us   ratio (min..max)    last loss"
            )
            measure(strategy, task, options.rounds, options.profile)
