"""Parts for the steps of the first hour: a model whose gradient is no number once, and a hook that profiles a step."""

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.hook import StepInfo
from dtrain.model.gpt import GPT


class Spikes(GPT):
    """In the tenth forward of training the outputs are infinite."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*args, **kwargs)
        if self.training:
            self.calls += 1
        return out * torch.inf if self.training and self.calls == 10 else out


class Profile:
    """Steps 6 and 7 on rank 0: <to>.json says which part of the time of NCCL's kernels ran beside other kernels."""

    about: ClassVar = {"figures": {}}
    every = 1

    def __init__(self, to: str) -> None:
        self._to = to
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def __call__(self, info: StepInfo) -> None:
        if dist.get_rank():
            return
        if info.step == 5:
            self._profiler.start()
        elif info.step == 7:
            torch.cuda.synchronize()
            self._profiler.stop()
            events = [each for each in self._profiler.events() if each.device_type == torch.autograd.DeviceType.CUDA]
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


class Kept:
    """After the last step, bytes: the allocator's peak, what it reserved, and what else of the device is taken."""

    about: ClassVar = {"figures": {}}
    every = 0

    def __call__(self, info: StepInfo) -> dict[str, int]:
        free, whole = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return {
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "beside": whole - free - reserved,
        }
