"""Imports that every rank needs are done once, before ranks are forked: the fork costs milliseconds, the imports
seconds. What does not survive a fork is left to each rank.
"""

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from dtrain.config.environment import COLD
from dtrain.launcher import loading_torch
from dtrain.planned import Plan
from dtrain.secrets import screen
from dtrain.storage import hub

BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""torch then asks NVIDIA's library whether there are GPUs, and starts no CUDA
(https://docs.pytorch.org/docs/stable/notes/cuda.html).
"""


class UnforkableError(Exception):
    """This process can fork no ranks any more: `module` did something, when it was imported, that no fork survives."""

    def __init__(self, module: str, deed: str) -> None:
        super().__init__(f"{module} {deed} when it is imported, which no fork survives")
        self.module = module

    def begin_again(self, arguments: Sequence[str], told: str = "", *, cold: str) -> NoReturn:
        """This process anew, with `told` as its standard input, without the module and those of `cold`."""
        screen.say(
            f"{self}: each rank imports it for itself, and starts later. Move that into a function that ranks call.",
            error=True,
        )
        stdin = os.memfd_create("told")
        os.write(stdin, told.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
        os.environ[COLD] = f"{cold},{self.module}".strip(",")
        os.execv(sys.executable, [sys.executable, "-m", *arguments])


def warm(plan: Plan, cold: str) -> None:
    """Import torch, the loop and the parts of the plan, but those of `cold`. Raises UnforkableError."""
    with loading_torch():
        import torch
        import torch._dynamo  # the first optimizer would import it, in every rank

        import dtrain.train  # noqa: F401

        if plan.trust:
            hub.watch()
        for part in (
            plan.strategy,
            plan.optim,
            plan.model,
            plan.data,
            plan.objective,
            plan.schedule,
            plan.checkpoint,
            plan.backend,
        ):
            _import(str(part["_target_"]).rsplit(".", 1)[0], cold.split(","))
    torch.set_num_threads(1)
    gc.freeze()  # or the collector of each rank copies these pages when it first looks at them


def _import(module: str, cold: Sequence[str]) -> None:
    if module in cold or module in sys.modules:
        return
    threads = threading.active_count()
    with contextlib.suppress(Exception, SystemExit):  # the rank says what is wrong with it
        __import__(module)
    if module.startswith("dtrain.") or not hasattr(os, "memfd_create"):  # not Linux: there is no CUDA
        return
    if threading.active_count() > threads:
        raise UnforkableError(module, "starts a thread")
    if _is_poisoned():
        raise UnforkableError(module, "starts CUDA (torch.cuda.is_available(), device_count() or what calls them)")


def _is_poisoned() -> bool:
    """Whether a fork of this process could not use CUDA: only a fork can tell."""
    import torch

    pid = os.fork()
    if not pid:
        os._exit(int(getattr(torch.cuda, "_is_in_bad_fork", bool)()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
