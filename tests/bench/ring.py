"""A step under mesh.cp with fused kernels and with products over tiles of scores, in turn; and the memory of attention at several lengths.

    OMP_NUM_THREADS=1 python tests/bench/ring.py [--rounds 3] [--width 256]

Two ranks, gloo, fp32. A step: forward and backward of a gpt of 2 layers and heads of 32, one row. CPU seconds of a rank, of which other work of the
machine takes none; attention alone: forward and backward of 8 heads of 32, bytes are the largest resident memory above that of before.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from small import on_mesh, tokens

from dtrain.mesh import Mesh
from dtrain.model.gpt import GPT
from dtrain.parallel import ring
from dtrain.parallel.context import Context
from dtrain.parallel.kernels import PRODUCTS, kernel_of

KERNELS: dict[str, Callable[..., object]] = {"products": lambda *_: PRODUCTS, "fused": kernel_of}


def context_of(mesh: Mesh) -> Context:
    return Context(mesh.group("cp"), mesh.coordinate["cp"], mesh.shape.cp, "ring")


def steps(mesh: Mesh, width: int, length: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Name of a kernel -> (CPU seconds, seconds) of each step."""
    torch.manual_seed(0)
    model = GPT(
        vocab=256, layers=2, heads=width // 32, kv_heads=None, width=width, hidden=None, tied=False, rope_base=1e4
    )
    context, whole = context_of(mesh), tokens(1, length, vocab=256)
    part, where = context.cut(whole), context.position_ids(length)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in KERNELS}
    for name in list(KERNELS) * rounds:
        with patch.object(ring, "kernel_of", KERNELS[name]), context.active():
            began = time.process_time(), time.perf_counter()
            F.cross_entropy(model(part, position_ids=where).flatten(0, 1), part.flatten()).backward()
            spent[name].append((time.process_time() - began[0], time.perf_counter() - began[1]))
    return spent


@contextmanager
def resident() -> Iterator[list[int]]:
    """Appends the most resident memory within beyond that at the start, looked at every millisecond."""
    page, most, over = os.sysconf("SC_PAGE_SIZE"), list[int](), threading.Event()
    now = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * page  # noqa: E731
    start = peak = now()

    def look() -> None:
        nonlocal peak
        while not over.wait(1e-3):
            peak = max(peak, now())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()
        most.append(peak - start)


def memory(mesh: Mesh, name: str, length: int) -> int:
    """Bytes of attention, forward and backward, beside its inputs."""
    context, own = context_of(mesh), (1, 8, length // mesh.shape.cp, 32)
    q, k, v = (torch.randn(own, requires_grad=True) for _ in range(3))
    with patch.object(ring, "kernel_of", KERNELS[name]), resident() as most:
        context.attention(q, k, v, is_causal=True).sum().backward()
    return most[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192])
    words = parser.parse_args()
    for length in words.lengths:
        both = on_mesh(partial(steps, width=words.width, length=length, rounds=words.rounds), cp=2)
        for index, unit in enumerate(("CPU s", "s")):
            seconds = {
                name: [max(rank[name][turn][index] for rank in both) for turn in range(words.rounds)]
                for name in KERNELS
            }
            ratios = [slow / fast for slow, fast in zip(*seconds.values(), strict=True)]
            medians = "  ".join(f"{name} {statistics.median(each):.2f} {unit}" for name, each in seconds.items())
            print(
                f"{length} tokens: {medians}  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})",
                flush=True,
            )
    for length in (4096, 8192, 16384):
        sizes = {name: max(on_mesh(partial(memory, name=name, length=length), cp=2)) for name in KERNELS}
        print(
            f"{length} tokens: " + "  ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
