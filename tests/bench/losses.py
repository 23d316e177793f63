"""The loss of logits in chunks, as it is written and compiled, beside whole logits: alone, and in a step of a gpt.

    OMP_NUM_THREADS=1 python tests/bench/losses.py loss [--sizes 2048,512,32768] [--types fp32 bf16] [--rounds 5] [--before <file>]
    OMP_NUM_THREADS=1 python tests/bench/losses.py step [--sizes 2048,256,32768] [--before <file>]

Sizes: tokens, width, vocabulary. Ways take turns in one process; ratios are to the first way, of seconds of the CPU, or of a GPU where
there is one. `--before`: another version of dtrain/objective/chunked.py (git show <commit>:dtrain/objective/chunked.py). Peak: of memory
that a GPU's allocator gave, of resident memory on a CPU, beyond that before the forward.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from ring import resident
from torch import Tensor

from dtrain.compile.blocks import build as blocks
from dtrain.model.gpt import GPT
from dtrain.objective import chunked, head, vocabulary
from dtrain.objective.head import Deferred, LossOptions, defer, deferring, is_compiled
from dtrain.predict.chunks import rows_for

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Way = Callable[[], Tensor]
"""A forward to a loss."""


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("before", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["before"] = module
    spec.loader.exec_module(module)
    return module


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def losses(
    device: torch.device, sizes: tuple[int, int, int], dtype: torch.dtype, before: ModuleType | None, rows: int
) -> tuple[dict[str, Way], list[Tensor]]:
    """The ways, and what has a gradient."""
    tokens, width, vocab = sizes
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocab, width, device=device) / width**0.5).requires_grad_()
    targets = torch.randint(vocab, (tokens,), device=device)

    def cast(work: Callable[[], Tensor]) -> Tensor:
        with torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext():
            return work()

    def by(module: Any, compiled: bool) -> Tensor:
        made = Deferred(hidden, weight, None, LossOptions(rows, compiled=compiled))
        with patch.object(head, "WRITTEN", ()):  # on a CPU runs never compile it
            loss: Tensor = module.cross_entropy(made, targets)
        return loss

    ways: dict[str, Way] = {"before": partial(by, before, False)} if before else {}
    ways |= {"as written": partial(by, chunked, False), "compiled": partial(by, chunked, True)}
    ways["whole"] = lambda: whole(hidden, weight, targets)
    if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        ways["torch's chunks"] = lambda: F.linear_cross_entropy(
            hidden, weight.to(dtype), targets, reduction="sum", options=options
        )
    compiled = torch.compile(whole)
    ways["whole, compiled"] = lambda: compiled(hidden, weight, targets)
    return {name: partial(cast, way) for name, way in ways.items()}, [hidden, weight]


class Step:
    """Forward and backward of a gpt of two blocks, whose loss is computed by `module`."""

    def __init__(self, device: torch.device, sizes: tuple[int, int, int], dtype: torch.dtype, compiled: bool) -> None:
        tokens, width, vocab = sizes
        torch.manual_seed(0)
        with device:
            self.model = GPT(
                vocab=vocab,
                layers=2,
                heads=width // 32,
                kv_heads=None,
                width=width,
                hidden=None,
                tied=False,
                rope_base=1e4,
            )
            self.batch = torch.randint(vocab, (max(1, tokens // 256), 256))
        defer(self.model, "auto")
        if compiled:
            blocks(mode="default")(self.model)
        self.device, self.dtype = device, dtype

    def __call__(self, module: Any) -> Tensor:
        with (
            patch.object(vocabulary, "chunked", module), deferring("auto", compiled=is_compiled(self.model)),
            torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32),
        ):  # fmt: skip
            return vocabulary.cross_entropy(self.model(self.batch), self.batch)


def steps(
    device: torch.device, sizes: tuple[int, int, int], dtype: torch.dtype, before: ModuleType | None
) -> tuple[dict[str, Way], list[Tensor]]:
    ways: dict[str, Way] = {}
    leaves: list[Tensor] = []
    for name, compiled in (("compile=none", False), ("compile=blocks", True)):
        step = Step(device, sizes, dtype, compiled)
        leaves += step.model.parameters()
        for kind, module in (("before", before), ("now", chunked)):
            if module is not None:
                ways[f"{name}, {kind}"] = partial(step, module)
    return ways, leaves


def run(way: Way, leaves: list[Tensor], device: torch.device) -> float:
    """Seconds of a forward and a backward."""
    for leaf in leaves:
        leaf.grad = None
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        way().backward()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.process_time()
    way().backward()
    return time.process_time() - began


def peak(way: Way, leaves: list[Tensor], device: torch.device) -> int:
    for leaf in leaves:
        leaf.grad = None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        way().backward()
        return torch.cuda.max_memory_allocated() - start
    with resident() as most:
        way().backward()
    return most[0]


def compared(ways: Mapping[str, Way], leaves: list[Tensor], device: torch.device, rounds: int) -> dict[str, Any]:
    """Name of a way -> its seconds, of each round, and bytes."""
    for way in ways.values():
        run(way, leaves, device)  # which compiles
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(run(way, leaves, device))
    return {name: (seconds[name], peak(way, leaves, device)) for name, way in ways.items()}


def table(found: Mapping[str, Any]) -> None:
    first = next(iter(found))
    for name, (spent, size) in found.items():
        ratios = [one / other for one, other in zip(spent, found[first][0], strict=True)]
        print(
            f"| {name} | {statistics.median(spent) * 1e3:.1f} ms | {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}) | {size / 2**20:.0f} MiB |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("loss", "step"))
    parser.add_argument("--sizes", nargs="+", default=["2048,512,32768"])
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", default="")
    parser.add_argument("--without", default="-", help="ways with this in their names")
    words = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = load(words.before) if words.before else None
    for text in words.sizes:
        a, b, c = (int(part) for part in text.split(","))
        for kind in words.types:
            rows = rows_for(a, width=b, vocabulary=c, bytes=TYPES[kind].itemsize, device=device.type)
            if words.what == "loss":
                ways, leaves = losses(device, (a, b, c), TYPES[kind], before, rows)
            else:
                ways, leaves = steps(device, (a, b, c), TYPES[kind], before)
            ways = {name: way for name, way in ways.items() if words.without not in name}
            print(f"{words.what} of {a} tokens, width {b}, vocabulary {c}, {kind}", flush=True)
            table(compared(ways, leaves, device, words.rounds))


if __name__ == "__main__":
    main()
