"""nanoGPT's published CPU setting: dtrain beside a loop written by hand, in one run.

    python tests/bench/shakespeare.py --text tinyshakespeare.txt [--steps 2000] [--optim muon]

Both train the same block (QK norm, SwiGLU, RMSNorm, tied head, zero output projections), 4 layers x 4 heads x 128, block 64,
batch 12, fp32, on the same text with the same optimizer, each in its own process. The two take turns of 20 steps, so that a
machine whose speed wanders is as fast for one as for the other; the clock is the optimizer's post-step hook in both. Prints
parameters, held-out loss and milliseconds per step of each, and the median over the turns of their ratios.
"""

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK, BATCH, LAYERS, HEADS, WIDTH = 64, 12, 4, 4, 128
TURN = 20


def by_hand(text: Path, steps: int, optim: str) -> None:
    """A loop as a good engineer writes it for one process."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import nn

    torch.manual_seed(1337)
    data = torch.from_numpy(np.frombuffer(text.read_bytes(), dtype=np.uint8).astype(np.int64))
    train, kept = data[: int(len(data) * 0.9)], data[int(len(data) * 0.9) :]
    hidden, D = 384, WIDTH // HEADS
    angles = torch.outer(torch.arange(BLOCK).float(), 10000.0 ** (-torch.arange(0, D, 2) / D))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.gate, self.up = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(WIDTH, hidden, bias=False)
            self.down = nn.Linear(hidden, WIDTH, bias=False)
            nn.init.zeros_(self.o.weight)
            nn.init.zeros_(self.down.weight)

        def forward(self, x):
            B, T, C = x.shape
            h = self.n1(x)
            q, k, v = (f(h).view(B, T, HEADS, D) for f in (self.q, self.k, self.v))
            q, k = rotate(F.rms_norm(q, (D,))), rotate(F.rms_norm(k, (D,)))
            y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
            x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
            h = self.n2(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(256, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.RMSNorm(WIDTH)
            nn.init.normal_(self.embed.weight, std=0.02)

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.embed.weight.T

    model = Net()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    if optim == "muon":
        optimizers = [
            torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.1),
            torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
    else:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)]
    clock = Clock()
    optimizers[-1].register_step_post_hook(lambda *_: clock.tick())
    rates = [o.param_groups[0]["lr"] for o in optimizers]
    for step in range(steps):
        factor = min((step + 1) / 100, 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        at = torch.randint(len(train) - BLOCK - 1, (BATCH,))
        x = torch.stack([train[i : i + BLOCK] for i in at])
        y = torch.stack([train[i + 1 : i + 1 + BLOCK] for i in at])
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            print(step, loss.item(), file=sys.stderr)
    with torch.no_grad():
        rows = kept[: (len(kept) - 1) // BLOCK * BLOCK].view(-1, BLOCK)
        after = kept[1 : rows.numel() + 1].view(-1, BLOCK)
        losses = [
            F.cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum")
            for a, b in zip(rows.split(64), after.split(64), strict=True)
        ]
    clock.report(float(sum(losses) / rows.numel()), sum(p.numel() for p in model.parameters()))


def by_dtrain(text: Path, steps: int, optim: str) -> None:
    """The recipe, with everything switched on, clocked at the same point."""
    import torch

    clock = Clock()
    original = torch.optim.AdamW.step

    def timed(self, *arguments, **keywords):
        answer = original(self, *arguments, **keywords)
        clock.tick()
        return answer

    torch.optim.AdamW.step = timed
    from dtrain.cluster import detect
    from dtrain.compose import compose
    from dtrain.launcher.rank import run_rank
    from dtrain.resolve import resolve

    words = ["recipe=shakespeare", f"data.path={text}", f"steps={steps}", f"out={tempfile.mkdtemp()}"]
    words += [] if optim == "muon" else ["optim=adamw", "optim.lr=1e-3"]
    plan = resolve(compose(words), detect())
    result = run_rank(plan)
    events = [json.loads(line) for line in (Path(plan.out) / "events.jsonl").read_text().splitlines()]
    clock.report(result.metrics["eval_loss"], next(e["parameters"] for e in events if e["event"] == "started"))


class Clock:
    """Counts steps, and after each turn waits to be told that the other side had its own."""

    def __init__(self) -> None:
        self.turns: list[list[float]] = []
        self.ticks: list[float] = []
        input()

    def tick(self) -> None:
        self.ticks.append(time.perf_counter())
        if len(self.ticks) == TURN:
            self.turns.append(sorted(b - a for a, b in itertools.pairwise(self.ticks)))
            self.ticks = []
            print("turn", flush=True)
            input()

    def report(self, loss: float, parameters: int) -> None:
        print(json.dumps({"turns": self.turns, "loss": loss, "parameters": parameters}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--optim", default="muon", choices=["muon", "adamw"])
    parser.add_argument("--only", choices=["hand", "dtrain"])
    options = parser.parse_args()
    if options.only:
        (by_hand if options.only == "hand" else by_dtrain)(options.text, options.steps, options.optim)
        return
    command = [
        sys.executable,
        __file__,
        "--text",
        str(options.text),
        "--steps",
        str(options.steps),
        "--optim",
        options.optim,
        "--only",
    ]
    sides = {
        name: subprocess.Popen(
            [*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for name in ("hand", "dtrain")
    }
    answers: dict[str, dict] = {}
    while len(answers) < len(sides):
        for name, side in sides.items():
            if name in answers:
                continue
            side.stdin.write("\n")
            side.stdin.flush()
            line = next(line for line in side.stdout if line == "turn\n" or line.startswith("{"))
            if line != "turn\n":
                answers[name] = json.loads(line)
    for name, answer in answers.items():
        median, p10 = (
            statistics.median(pick(turn) for turn in answer["turns"]) * 1e3 for pick in (statistics.median, tenth)
        )
        print(
            f"{name}: {answer['parameters']:,} parameters, held-out loss {answer['loss']:.4f}, median {median:.1f} ms, p10 {p10:.1f} ms"
        )
    for label, pick in (("median", statistics.median), ("p10", tenth), ("mean", statistics.fmean)):
        ratios = sorted(
            pick(d) / pick(h) for d, h in zip(answers["dtrain"]["turns"], answers["hand"]["turns"], strict=True)
        )
        print(
            f"{label}: dtrain / hand = {statistics.median(ratios):.3f} ({tenth(ratios):.3f} .. {ratios[-1 - len(ratios) // 10]:.3f})"
        )


def tenth(ordered: list[float]) -> float:
    return ordered[len(ordered) // 10]


if __name__ == "__main__":
    main()
