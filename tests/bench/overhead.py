"""What dtrain costs per step, beside loops written by hand.

    OMP_NUM_THREADS=1 python tests/bench/overhead.py [--rounds 5] [--steps 500] [--startup]

MLP 64-128-128-128-10, batch 32, AdamW, clip 1.0, one process, one thread, the same samples for all; on a GPU where there is one. Every round runs every
system once, in rotated order; the clock is the optimizer's post-step hook in all of them. Printed per system: the median over
rounds of the ratio to `raw` of the same round, for the 10th percentile of step time and for CPU time per step. A figure counts
when both agree within 5%.

raw      the usual loop: DataLoader, default AdamW, clip_grad_norm_
fast     the best loop by hand: batch gather, fused AdamW, foreach clip, nothing else
dtrain   `python -m dtrain` with all defaults on: rows, TensorBoard, console, checkpoints, evaluation, signals

--startup: whole fresh processes up to the first optimizer step, a bare torch script beside dtrain.
"""

import argparse
import contextlib
import io
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

SAMPLES, INPUTS, WIDTH, CLASSES, BATCH = 20_000, 64, 128, 10, 32
WARMUP = 100


class Samples:
    """The samples of every system: a TensorDataset, made once."""

    def __new__(cls):  # type: ignore[no-untyped-def]
        import torch
        from torch.utils.data import TensorDataset

        draw = torch.Generator().manual_seed(0)
        x = torch.randn(SAMPLES, INPUTS, generator=draw)
        return TensorDataset(x, (x @ torch.randn(INPUTS, CLASSES, generator=draw)).argmax(1))


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def network():  # type: ignore[no-untyped-def]
    from torch import nn

    sizes = [INPUTS, WIDTH, WIDTH, WIDTH]
    hidden = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES)).to(device())


def raw(steps: int) -> float:
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    model, data, on = network(), Samples(), device()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(())
    for _ in range(steps):
        pair = next(batches, None)
        if pair is None:
            batches = iter(DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True))
            pair = next(batches)
        loss = F.cross_entropy(model(pair[0].to(on)), pair[1].to(on))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss)


def fast(steps: int) -> float:
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    model, (x, y) = network(), (tensor.to(device()) for tensor in Samples().tensors)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    order, at = torch.randperm(SAMPLES, device=x.device), 0
    for _ in range(steps):
        if at + BATCH > SAMPLES:
            order, at = torch.randperm(SAMPLES, device=x.device), 0
        rows = order[at : at + BATCH]
        at += BATCH
        loss = F.cross_entropy(model(x[rows]), y[rows])
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
    return float(loss)


def dtrain(steps: int) -> float:
    from dtrain.cluster import detect
    from dtrain.compose import compose
    from dtrain.resolve import resolve
    from dtrain.train import train

    with tempfile.TemporaryDirectory() as out:
        words = [
            "model=mlp", "data=dataset", "data.dataset._target_=overhead.Samples", "trust=[overhead]", "objective=classification",
            f"batch={BATCH}", f"steps={steps}", f"out={out}", "optim.betas=[0.9,0.999]", "optim.weight_decay=0.01",
        ]  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            return train(resolve(compose(words), detect())).loss or 0.0


SYSTEMS: dict[str, Callable[[int], float]] = {"raw": raw, "fast": fast, "dtrain": dtrain}


def measure(rounds: int, steps: int) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    torch.set_num_threads(1)
    times: list[float] = []
    cpu: list[float] = []

    def tick(*_: object) -> None:
        times.append(time.perf_counter())
        cpu.append(time.process_time())

    register_optimizer_step_post_hook(tick)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    losses = {}
    names = list(SYSTEMS)
    for round_ in range(rounds + 1):  # the first one warms everything and is dropped
        for name in names[round_ % 3 :] + names[: round_ % 3]:
            times.clear()
            cpu.clear()
            losses[name] = SYSTEMS[name](steps)
            gaps = sorted(b - a for a, b in zip(times[WARMUP:], times[WARMUP + 1 :], strict=False))
            found[name].append((gaps[len(gaps) // 10] * 1e6, (cpu[-1] - cpu[WARMUP]) / (len(cpu) - 1 - WARMUP) * 1e6))
    base = found["raw"][1:]
    print("system   p10 us   ratio (min..max)        cpu us   ratio (min..max)        last loss")
    for name in names:
        cells = []
        for which in (0, 1):
            values = [each[which] for each in found[name][1:]]
            ratios = [each[which] / other[which] for each, other in zip(found[name][1:], base, strict=True)]
            cells.append(
                f"{statistics.median(values):7.0f}  {statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
            )
        print(f"{name:<8} {cells[0]}    {cells[1]}    {losses[name]:.4f}")


BARE = f"""
import torch, torch.nn.functional as F
from torch import nn
model = nn.Sequential(nn.Linear({INPUTS}, {WIDTH}), nn.GELU(), nn.Linear({WIDTH}, {CLASSES}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn({BATCH}, {INPUTS}), torch.randint({CLASSES}, ({BATCH},))
F.cross_entropy(model(x), y).backward(); optimizer.step()
import os; os._exit(0)
"""
FIRST = """
import os, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: os._exit(0))
from dtrain.__main__ import main
main(["model=mlp", "data=synthetic", "steps=1", f"out={os.environ['OUT']}"])
"""


def startup(rounds: int) -> None:
    """Seconds from the start of the interpreter to the end of the first optimizer step."""
    found: dict[str, list[float]] = {"bare torch script": [], "dtrain": []}
    for _ in range(rounds):
        for name, code in (("bare torch script", BARE), ("dtrain", FIRST)):
            with tempfile.TemporaryDirectory() as out:
                began = time.perf_counter()
                subprocess.run(
                    [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OUT": out}
                )
                found[name].append(time.perf_counter() - began)
    ratios = [d / b for d, b in zip(found["dtrain"], found["bare torch script"], strict=True)]
    for name, seconds in found.items():
        print(f"{name:<18} {statistics.median(seconds):.2f} s to the first step")
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--startup", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - `overhead.Samples` is imported by name
    startup(options.rounds) if options.startup else measure(options.rounds, options.steps)
