"""Every collective of a step of a real run, as torch's dispatcher sees it: what kind, among which ranks, how many bytes, from which part of the loop.

ranks = count(plan("strategy=fsdp", "devices=2"))      # [rank][Seen] -> [calls, bytes]

A call's bytes are its payload on this rank as nccl-tests counts it (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md):
the whole of what is reduced, gathered or scattered; of an exchange what this rank gives away, of a message its tensor. Groups of one
rank are left out: nothing crosses anything.
"""

import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from pool import resident
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dtrain
from dtrain.loop.metrics import Log
from dtrain.planned import Plan
from dtrain.train import train

KINDS = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather", "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all", "broadcast_": "broadcast", "broadcast": "broadcast",
    "send": "send", "recv_": "recv", "barrier": "barrier", "scatter_": "scatter",
}  # fmt: skip
"""Operators of torch's namespaces c10d and _c10d_functional."""
QUIET = ("wait_tensor", "_wrap_tensor_autograd")
INPUTS = {"all_reduce", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "scatter"}
PARTS = {
    "lifecycle/stop.py": "stop", "checkpoint": "save", "evaluation/observe.py": "look", "loop/metrics.py": "flush",
    "loop/spike.py": "guard", "lifecycle/watchdog.py": "watch", "loop/build_check.py": "start",
}  # fmt: skip
"""A file or folder of dtrain that stands on the stack -> in what part of the loop; else it is the `step` itself."""
PACKAGE = f"{Path(dtrain.__file__).parent}/"


class Seen(NamedTuple):
    part: str
    kind: str
    ranks: tuple[int, ...]


class Counting(TorchDispatchMode):
    """`seen`: what came by inside the context, {Seen: [calls, bytes]}."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Seen, list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its own collectives come by here afterwards
            return NotImplemented
        result = func(*args, **kwargs or {})
        name = func.__name__.split(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and name not in QUIET:
            kind, among = KINDS[name], _group(args)
            if len(among) > 1:
                entry = self.seen[Seen(_part(), kind, among)]
                entry[0] += 1
                entry[1] += _bytes(name, kind, args, len(among))
        return result


def _group(args: Any) -> tuple[int, ...]:
    """The ranks of the group: an object of the dispatcher's, or its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
        if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min", "product"):
            return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(arg)))
    raise AssertionError(f"no group in {args}")


def _bytes(name: str, kind: str, args: Any, size: int) -> int:
    tensors = [part for part in tree_leaves(args[0]) if isinstance(part, Tensor)]
    if name in ("_reduce_scatter_base_", "alltoall_base_"):  # (output, input, ...)
        tensors = [args[1]]
    assert kind in INPUTS or kind in ("all_gather", "barrier")
    held = sum(part.numel() * part.element_size() for part in tensors)
    return held * size if name == "all_gather_into_tensor" else held


def _part() -> str:
    """By the innermost file of dtrain's that has a part of its own."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            path = frame.f_code.co_filename.removeprefix(PACKAGE)
            part = PARTS.get(path) or PARTS.get(path.partition("/")[0])
            if part:
                return part
        frame = frame.f_back
    return "step"


def count(plan: Plan, *, seconds: float = 300) -> list[dict[Seen, list[int]]]:
    """Of each rank, in the third step of the run: one like all that follow."""
    with tempfile.TemporaryDirectory() as folder:
        return resident(plan.world, _rank, plan, folder, seconds=seconds)


def _rank(plan: Plan, folder: str) -> dict[Seen, list[int]]:
    counting, record = Counting(), Log.record

    def end_step(log: Log, step: int, *arguments: Any, **options: Any) -> None:
        record(log, step, *arguments, **options)
        if step == 2:
            third.enter_context(counting)
        elif step == 3:
            third.close()

    with ExitStack() as third, patch.object(Log, "record", end_step):
        train(replace(plan, out=f"{folder}/out"))
    return {seen: list(entry) for seen, entry in counting.seen.items()}
