"""Loops that measure what the cores of this host do, instead of training: `Plan -> Result`.

`cores`: rates of operators, one process at a time and all at once, and seconds of collectives. `steps`: seconds of a
step of the plan. The lowest quarter of many repetitions counts, and where one thread works it is its own time of the
processor: other work can only make both longer.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from dtrain.build import build
from dtrain.cluster.measured import WAYS
from dtrain.config.facts import fact
from dtrain.doctor import bandwidth
from dtrain.loop.assemble import assemble, prepare
from dtrain.loop.step import gradients_of, zero
from dtrain.mesh import Mesh
from dtrain.optim.clip import clip
from dtrain.planned import Plan
from dtrain.predict.time import CAUSAL
from dtrain.result import Result, versions

ROWS, WIDTHS, CHANNELS, TOKENS = (16, 64, 256, 1024), (64, 256, 1024), (4, 16, 64), (64, 256, 1024)
"""Sizes of matrix products, with square weights, of convolutions and of attention."""
SECONDS, LONGEST, FEWEST, MOST = 0.08, 0.4, 3, 200
"""Time per figure, also where other work has the cores, and limits of its repetitions."""
REPETITIONS = 20
"""Of a collective."""
STEP_SECONDS, WARM, STEPS = 0.6, 3, (10, 200)
"""Time for the steps of a plan, the steps before them, and limits of their number."""
ELEMENTS = 1 << 18
"""Of a tensor of the operators on each element: those of 1,024 tokens in a stream of 256."""
TURNS, MULTIPLIED = 12, 1 << 28
"""Weights, or pairs of tensors, that are computed with in turn, so that each is found in memory, not in a cache; and
multiply-adds of all products, beyond which they are fewer.
"""
Work = tuple[Callable[[], object], float]
"""(an act, the operations or bytes that it counts)."""


def cores(plan: Plan) -> Result:
    """Measure operators and collectives. `metrics`: `figures` as in dtrain.cluster.measured; `calls`: operation ->
    bytes and seconds; `busy`: the part of the time in which other work had the cores.
    """
    began = time.perf_counter()
    with build(plan.backend).open():
        mesh = Mesh(plan.mesh, device=plan.device)
        figures: dict[str, Any] = {}
        waited = list[float]()
        for name, dtype in (("product_fp32", torch.float32), ("product_bf16", torch.bfloat16)):
            tables = {rows: _in_each_way(mesh, _products(rows, dtype), waited) for rows in ROWS}
            figures[name] = {way: [[rows, table[way]] for rows, table in tables.items()] for way in WAYS}
        for name, works in _operators().items():
            figures[name] = _in_each_way(mesh, works, waited)
        for name, work in {"pointwise": _pointwise(float(fact(plan.compile, "moves"))), "update": _update()}.items():
            ways = _in_each_way(mesh, {1: work}, waited)
            figures[name] = {way: table[0][1] for way, table in ways.items()}
        calls = _calls(mesh) if mesh.world > 1 else {}
        figures = mesh.gather(figures)[0]
        metrics = {"figures": figures, "calls": calls, "busy": max(0.0, 1 - sum(waited) / len(waited))}
        return _result(metrics, began)


def steps(plan: Plan) -> Result:
    """Measure the steps of `plan`, as `train` takes them. `metrics`: `seconds`, of the slowest rank."""
    began = time.perf_counter()
    with build(plan.backend).open():
        mesh = Mesh(plan.mesh, device=plan.device)
        parts = assemble(plan, mesh)
        training = prepare(parts)
        parameters, taken = gradients_of(parts.model), list[float]()
        try:
            most = WARM + STEPS[1]
            while len(taken) < most:
                start = time.perf_counter()
                training.step(training.stream, len(taken))
                clip(parameters, plan.clip, stages=mesh.shape.pp)
                training.optimizer.step()
                zero(parameters)
                taken.append(time.perf_counter() - start)
                if len(taken) == WARM:  # ranks agree on a number of steps
                    quick = float(mesh.max(torch.tensor(taken[-1])))
                    most = WARM + max(STEPS[0], min(STEPS[1], int(STEP_SECONDS / quick)))
        finally:
            training.stream.close()
        metrics = {"seconds": float(mesh.max(torch.tensor(_usual(taken[WARM:]))))}
        return _result(metrics, began)


def _result(metrics: dict[str, Any], began: float) -> Result:
    seconds = time.perf_counter() - began
    return Result(status="finished", step=0, loss=None, wall_seconds=seconds, metrics=metrics, versions=versions())


def _calls(mesh: Mesh) -> dict[str, list[list[float]]]:
    """Of collectives of all ranks, the usual seconds of the slowest rank."""
    found: dict[str, list[list[float]]] = {}
    for operation, size in product(bandwidth.FACTORS, bandwidth.SIZES["gloo"]):
        numbers = size // 4 // mesh.world * mesh.world
        act = bandwidth.call_of(operation, numbers, mesh.world, dist.group.WORLD, torch.device("cpu")).act
        for _ in range(2):  # the first sets up connections
            act()
        taken, began = list[float](), time.perf_counter()
        while len(taken) < REPETITIONS and float(mesh.max(torch.tensor(time.perf_counter() - began))) < LONGEST:
            start = time.perf_counter()
            act()
            taken.append(time.perf_counter() - start)
        found.setdefault(operation, []).append([4 * numbers, float(mesh.max(torch.tensor(_usual(taken))))])
    return found


def _in_each_way(mesh: Mesh, works: Mapping[int, Work], waited: list[float]) -> dict[str, list[list[float]]]:
    """Way -> (size, rate) of each size: alone on one thread, alone on all cores, and with all ranks at once."""
    ways: dict[str, list[list[float]]] = {}
    for way, threads in zip(WAYS, (1, mesh.world, 1), strict=True):
        table = list[list[float]]()
        for size, (act, amount) in works.items():
            mesh.barrier()
            rate = 0.0
            if way == "together" or mesh.rank == 0:
                torch.set_num_threads(threads)
                rate = amount / _seconds(act, threads, waited)
                torch.set_num_threads(1)
            rates = sorted(mesh.gather(rate))
            usual = rates[len(rates) // 2] if way == "together" else rates[-1]
            before = ways["alone"][len(table)][1] if way == "whole" else 0.0  # more threads can also do it by one
            table.append([size, max(usual, before)])
        ways[way] = table
    return ways


def _usual(taken: Sequence[float]) -> float:
    return sorted(taken)[len(taken) // 4]


def _seconds(act: Callable[[], object], threads: int, waited: list[float]) -> float:
    """The usual seconds of `act`. The part of the time in which one thread had a core is added to `waited`."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    act()
    began, had, times = time.perf_counter(), time.thread_time(), list[float]()
    while len(times) < FEWEST or (sum(times) < SECONDS and len(times) < MOST and time.perf_counter() < began + LONGEST):
        times.append(_timed(act, clock))
    if threads == 1:
        waited.append(min(1.0, (time.thread_time() - had) / max(1e-9, time.perf_counter() - began)))
    return _usual(times)


def _timed(act: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    act()
    return max(clock() - began, 1e-9)


def _operators() -> dict[str, dict[int, Work]]:
    return {
        "convolution": {channels: _convolution(channels) for channels in CHANNELS},
        "attention": {tokens: _attention(tokens) for tokens in TOKENS},
    }


def _backward(forwards: Sequence[Callable[[], Tensor]], leaves: Sequence[Tensor], out: Tensor) -> Callable[[], None]:
    """Forwards and then their backwards, as in a model, whose tensors are in no cache by then."""

    def act() -> None:
        for result in [forward() for forward in forwards][::-1]:
            result.backward(out)
        for leaf in leaves:
            leaf.grad = None

    return act


def _products(rows: int, dtype: torch.dtype) -> dict[int, Work]:
    return {width: _product(rows, width, dtype) for width in WIDTHS}


def _product(rows: int, width: int, dtype: torch.dtype) -> Work:
    """Products of [rows, width] with square weights in turn, as in a model."""
    count = max(1, min(TURNS, MULTIPLIED // (rows * width**2)))
    pairs = [[torch.rand(size, width, dtype=dtype).requires_grad_() for size in (rows, width)] for _ in range(count)]
    forwards = [partial(functional.linear, *pair) for pair in pairs]
    act = _backward(forwards, [leaf for pair in pairs for leaf in pair], torch.rand(rows, width, dtype=dtype))
    return act, 6.0 * rows * width**2 * count


def _convolution(channels: int) -> Work:
    x, out = (torch.rand(8, channels, 16, 16) for _ in range(2))
    weight = torch.rand(channels, channels, 3, 3).requires_grad_()
    leaves = [x.requires_grad_(), weight]
    return _backward([lambda: functional.conv2d(x, weight, padding=1)], leaves, out), 6.0 * x.numel() * channels * 9


def _attention(tokens: int) -> Work:
    q, k, v = leaves = [torch.rand(2, 4, tokens, 64).requires_grad_() for _ in range(3)]
    out = torch.rand(2, 4, tokens, 64)

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _backward([forward], leaves, out), CAUSAL * 7 * 2 * 2 * 4 * 64 * tokens**2


def _pointwise(moves: float) -> Work:
    """silu(x) * y, as dtrain.predict.time counts it: the three tensors that are kept, `moves` times."""
    pairs = [[torch.rand(ELEMENTS).requires_grad_() for _ in range(2)] for _ in range(TURNS)]
    forwards = [partial(lambda x, y: functional.silu(x) * y, *pair) for pair in pairs]
    act = _backward(forwards, [leaf for pair in pairs for leaf in pair], torch.rand(ELEMENTS))
    return act, moves * 3 * 4.0 * ELEMENTS * TURNS


def _update() -> Work:
    """AdamW, with the norm and clipping of gradients, as dtrain.predict.time counts it: ten numbers moved for each."""
    weights = [torch.rand(ELEMENTS).requires_grad_() for _ in range(8)]
    for weight in weights:
        weight.grad = torch.rand(ELEMENTS)
    optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=True)

    def act() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1e9)
        optimizer.step()

    return act, 8 * ELEMENTS * 4.0 * 10
