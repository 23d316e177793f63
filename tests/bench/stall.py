"""How long training stands still for a checkpoint, against `torch.save` of the same state, in interleaved rounds; and what reading back costs.

    OMP_NUM_THREADS=1 python tests/bench/stall.py [--width 512] [--rounds 7]

Bytes are the same in all: a GPT with AdamW's state on the CPU. `torch.save` writes to the page cache; a commit is synced to the disk.
"""

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dtrain.backend.gloo import Gloo
from dtrain.build import build
from dtrain.checkpoint.sharded import Sharded
from dtrain.checkpoint.state import TrainState
from dtrain.mesh import Mesh
from dtrain.model.gpt import GPT
from dtrain.planned import MeshShape

ADAMW = {"_target_": "dtrain.optim.adamw.build", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def seconds(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def trained(width: int) -> TrainState:
    model = GPT(vocab=4096, layers=8, heads=8, width=width, hidden=4 * width)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
            parameter.grad = torch.zeros_like(parameter)
    state = TrainState(model, build(ADAMW, model=model))
    assert state.optimizer
    state.optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None
    return state


def measure(mesh: Mesh, state: TrainState, folder: Path, rounds: int) -> None:
    out, theirs = folder / "out", folder / "theirs.pt"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = Sharded(out=str(out), mesh=mesh, resume="auto", every=1, keep=1)
    rows: dict[str, list[float]] = {
        "torch.save": [],
        "stall": [],
        "drain": [],
        "torch.load": [],
        "restore": [],
        "digests": [],
    }

    def save() -> None:
        state.step += 1
        checkpoint.save(state)

    first = seconds(save)
    checkpoint.wait()
    size = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    for _ in range(rounds):
        rows["torch.save"].append(seconds(lambda: torch.save(state.tensors(), theirs)))
        rows["stall"].append(seconds(save))
        rows["drain"].append(rows["stall"][-1] + seconds(checkpoint.wait))
        rows["torch.load"].append(seconds(lambda: torch.load(theirs)))
        rows["restore"].append(
            seconds(lambda: Sharded(out=str(out), mesh=mesh, resume="must", every=1, keep=1).restore(state))
        )
        files = [path.read_bytes() for path in out.rglob("*.safetensors")]
        rows["digests"].append(seconds(lambda files=files: [hashlib.sha256(data).digest() for data in files]))
    print(f"{size / 1e6:.0f} MB, {rounds} rounds; the first save stood still for {first:.3f} s")
    for name, times in rows.items():
        against = "torch.load" if name in ("torch.load", "restore", "digests") else "torch.save"
        ratios = [a / b for a, b in zip(times, rows[against], strict=True)]
        print(
            f"{name:12} {statistics.median(times):.3f} s  ratio to {against} {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
        )


def throughput(mesh: Mesh, state: TrainState, folder: Path, rounds: int) -> None:
    """Time of 40 steps with a save every 10, over that of 40 steps without; one thread computes, so a second core is free when the machine is."""
    checkpoint, tokens = (
        Sharded(out=str(folder / "run"), mesh=mesh, resume="auto", every=10, keep=1),
        torch.randint(4096, (2, 128)),
    )
    assert state.optimizer

    def steps(every: int) -> None:
        for number in range(40):
            state.model(tokens).square().mean().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1
            if every and number % every == 0:
                checkpoint.save(state)

    steps(10)
    pairs = [(seconds(lambda: steps(10)), seconds(lambda: steps(0))) for _ in range(rounds)]
    checkpoint.wait()
    ratios = [saving / plain for saving, plain in pairs]
    step = statistics.median(plain for _, plain in pairs) / 40
    print(
        f"a save every 10 steps of {step:.3f} s: {statistics.median(ratios):.3f} of the time without ({min(ratios):.3f}..{max(ratios):.3f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with Gloo(timeout=60).open(), tempfile.TemporaryDirectory() as folder:
        mesh, state = Mesh(MeshShape(), device="cpu"), trained(options.width)
        measure(mesh, state, Path(folder), options.rounds)
        throughput(mesh, state, Path(folder), options.rounds)


if __name__ == "__main__":
    main()
