"""Where the time of some steps goes: kernels by kind, and the longest of them; and a call at each step of a run."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.profiler import ProfilerActivity as Activity

KINDS = {
    "triton": ("triton",),
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn_generated"),
    "product": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "wgmma", "splitk", "aten::mm", "aten::addmm"),
    "optimizer": ("adam", "multi_tensor", "foreach", "lpnorm"),
    "communication": ("nccl",),
    "embedding": ("embedding", "indexselect", "index_select", "radix", "sort"),
    "copy": ("memcpy", "memset", "aten::copy_"),
    "elementwise": ("elementwise", "reduce_kernel", "softmax"),
}
"""Kind of kernel -> parts of the names that kernels of it have; the first that matches counts."""
LONGEST = 50
DEVICE = {Activity.CPU: torch.autograd.DeviceType.CPU, Activity.CUDA: torch.autograd.DeviceType.CUDA}


@contextmanager
def kernels(path: str, name: str, steps: int) -> Iterator[None]:
    """Profiles `steps` steps: prints one JSON line, ms of a step by kind, and adds the longest kernels to the file `path`.
    Without a GPU the operators of the CPU take the place of kernels.
    """
    on = Activity.CUDA if torch.cuda.is_available() else Activity.CPU
    with torch.profiler.profile(activities=[on]) as profiler:
        yield
        if on is Activity.CUDA:
            torch.cuda.synchronize()
    ms, calls = Counter[str](), Counter[str]()
    for event in profiler.events():
        if event.device_type == DEVICE[on] and not getattr(event, "is_user_annotation", False):
            spent = event.self_cpu_time_total if on is Activity.CPU else event.time_range.elapsed_us()
            ms[event.name] += spent / 1e3 / steps
            calls[event.name] += 1
    kinds = Counter[str]()
    for each, spent in ms.items():
        kinds[kind(each)] += spent
    by_kind = {each: round(spent, 3) for each, spent in kinds.most_common()}
    row = {"kernels of": name, "ms a step": round(ms.total(), 2), "calls a step": round(calls.total() / steps)}
    print(json.dumps({**row, "by kind": by_kind}), flush=True)
    lines = [f"{spent:9.3f} ms {calls[each] / steps:7.1f} x  {each[:110]}" for each, spent in ms.most_common(LONGEST)]
    with Path(path).open("a") as file:
        print(f"{name}: {ms.total():.2f} ms a step, {by_kind}", *lines, "", sep="\n", file=file)


def kind(kernel: str) -> str:
    return next((each for each, parts in KINDS.items() if any(part in kernel.lower() for part in parts)), "other")


@contextmanager
def each_step(call: Callable[[int], None]) -> Iterator[None]:
    """`call` gets the number of every step of dtrain's loop in this process, before the step."""
    from dtrain.lifecycle.watchdog import Watchdog

    beat = Watchdog.begin_step

    def watched(self: Watchdog, step: int, seen: int) -> None:
        call(step)
        beat(self, step, seen)

    Watchdog.begin_step = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        Watchdog.begin_step = beat  # type: ignore[method-assign]


class Overlap:
    """A hook: profiles steps 6 and 7 on rank 0; <to>.json says which part of the time of NCCL's kernels ran beside other kernels."""

    about: ClassVar = {"figures": {}}
    every = 1

    def __init__(self, to: str) -> None:
        self._to = to
        self._profiler = torch.profiler.profile(activities=[Activity.CUDA])

    def __call__(self, info: Any) -> None:
        if torch.distributed.get_rank():
            return
        if info.step == 5:
            self._profiler.start()
        elif info.step == 7:
            torch.cuda.synchronize()
            self._profiler.stop()
            events = [each for each in self._profiler.events() if each.device_type == DEVICE[Activity.CUDA]]
            spans = [("nccl" in each.name.lower(), each.time_range.start, each.time_range.end) for each in events]
            Path(f"{self._to}.json").write_text(json.dumps({"hidden": hidden(spans)}))


def hidden(spans: list[tuple[bool, float, float]]) -> float:
    """(whether it communicates, begin, end) of kernels -> the part of the communicating time in which another kernel runs; 1 when there is none."""
    others = sorted((begin, end) for sends, begin, end in spans if not sends)
    sent = sum(end - begin for sends, begin, end in spans if sends)
    beside = 0.0
    for sends, begin, end in spans:
        at = begin
        for other_begin, other_end in others if sends else ():
            first, last = max(at, other_begin), min(end, other_end)
            if last > first:
                beside, at = beside + last - first, last
    return beside / sent if sent else 1.0
