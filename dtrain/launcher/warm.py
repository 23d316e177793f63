"""Imports that every rank needs, done once before ranks are forked: a fork costs milliseconds, the imports seconds.
Modules that do not survive a fork are left to each rank.
"""

import contextlib
import functools
import gc
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from dtrain.config.environment import COLD
from dtrain.launcher.rank import loading_torch
from dtrain.planned import Plan
from dtrain.secrets import screen
from dtrain.storage import hub

BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""torch then asks NVIDIA's library for GPUs, and does not start CUDA
(https://docs.pytorch.org/docs/stable/notes/cuda.html).
"""


class UnforkableError(Exception):
    """This process can no longer fork ranks: importing `module` did something that no fork survives."""

    def __init__(self, module: str, deed: str) -> None:
        super().__init__(f"{module} {deed} when it is imported, which no fork survives")
        self.module = module

    def begin_again(self, arguments: Sequence[str], stdin: str = "", *, cold: str) -> NoReturn:
        """Execute this process again with `stdin` as its standard input, without importing the module and `cold`."""
        screen.say(
            f"{self}: each rank imports it for itself, and starts later. Move that into a function that ranks call.",
            error=True,
        )
        file = os.memfd_create("stdin")
        os.write(file, stdin.encode())
        os.lseek(file, 0, os.SEEK_SET)
        os.dup2(file, 0)
        os.environ[COLD] = f"{cold},{self.module}".strip(",")
        os.execv(sys.executable, [sys.executable, "-m", *arguments])


@functools.cache
def load() -> None:
    """Import torch and the loop, once for a process and its forks."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the stack of whatever lost its peer, beside the error
    os.environ.setdefault(BY_NVML, "1")
    with loading_torch():
        import encodings.idna  # noqa: F401 # the first connection would import it, in every rank

        import numpy.ma  # noqa: F401 # numpy.unique would
        import torch
        import torch._dynamo  # the first optimizer would

        import dtrain.train  # noqa: F401
    torch.set_num_threads(1)
    first_step()
    gc.freeze()  # else the collector of each rank would copy these pages


def first_step() -> None:
    """Train a tiny network for one step: what torch sets up in it, ranks then share. Not where torch was built for an
    accelerator, which the backward would start.
    """
    import torch
    from torch import nn

    if torch.accelerator.current_accelerator() is None:
        network = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(network.parameters(), fused=True)
        nn.functional.mse_loss(network(torch.randn(8, 8)), torch.zeros(8, 8)).backward()
        optimizer.step()


def warm(plan: Plan, cold: str) -> None:
    """Import torch, the loop and the parts of the plan, except the modules of `cold`. Raises UnforkableError."""
    load()
    if plan.trust:
        hub.watch()
    parts = (plan.strategy, plan.optim, plan.model, plan.data, plan.objective, plan.schedule)
    for part in (*parts, plan.checkpoint, plan.backend):
        _import(str(part["_target_"]).rsplit(".", 1)[0], cold.split(","))
    gc.freeze()


def _import(module: str, cold: Sequence[str]) -> None:
    if module in cold or module in sys.modules:
        return
    threads = threading.active_count()
    with contextlib.suppress(Exception, SystemExit):  # the rank reports the error
        __import__(module)
    if module.startswith("dtrain.") or not hasattr(os, "memfd_create"):  # not Linux: there is no CUDA
        return
    if threading.active_count() > threads:
        raise UnforkableError(module, "starts a thread")
    if _is_poisoned():
        raise UnforkableError(module, "starts CUDA (torch.cuda.is_available(), device_count() or what calls them)")


def _is_poisoned() -> bool:
    """Whether a fork of this process could not use CUDA, tried in a fork."""
    import torch

    pid = os.fork()
    if not pid:
        os._exit(int(getattr(torch.cuda, "_is_in_bad_fork", bool)()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
