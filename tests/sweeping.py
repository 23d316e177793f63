"""Models of sweeps: what goes wrong in a job, and what one job must not see of another."""

import glob
import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from dtrain.hook import StepInfo

MADE: list[int] = []
"""The models that this process has made."""


class Counting(nn.Module):
    """Computes other numbers in each model that a process makes after the first."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        MADE.append(len(MADE))
        self.net, self.more = nn.Linear(16, outputs), len(MADE)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs.flatten(1)) * self.more


class Calling(nn.Module):
    """Computes other numbers in each call after the first of a process."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        type(self).calls += 1
        return self.net(inputs.flatten(1)) * (1 + 1 / type(self).calls)


class Greedy(nn.Module):
    """Takes 64 MiB for each sample of a forward while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            torch.ones(len(inputs), 64 << 18)
        return self.net(inputs.flatten(1))


class Peak:
    """A hook whose figure is `top` after two steps, and 1 - `top` after the others: the job that was best ends worst."""

    every = 1
    about: ClassVar = {"figures": {"eval_score": "highest"}}

    def __init__(self, top: float) -> None:
        self._top = top

    def __call__(self, info: StepInfo) -> dict[str, float]:
        return {"score": self._top if info.step == 2 else 1 - self._top}


class Trouble(nn.Module):
    """Meets trouble in its third forward, in the way that `how` says, whatever number it ends with; `once`: a file that
    says it has. One that diverges counts on from its checkpoint, so that it does so however often it is begun.
    """

    calls: Tensor

    def __init__(self, how: str, once: str = "") -> None:
        super().__init__()
        self.net, self.once = nn.Linear(16, 10), Path(once) if once else None
        self.how = how.rstrip("0123456789")
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=self.how == "diverges")

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and self.how != "none" and not (self.once and self.once.exists()):
            if self.once:
                self.once.touch()
            trouble(self.how)
        return self.net(inputs.flatten(1)) * (float("nan") if self.how == "diverges" and self.calls >= 3 else 1.0)


class Known(nn.Module):
    """Its loss is a known function of its words; `fails`: whether it meets an exception where x is above 0.1."""

    def __init__(self, x: float = 0.01, y: float = 0.3, kind: str = "a", fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.value = (math.log10(x) + 2) ** 2 + 4 * (y - 0.3) ** 2 + (kind != "a")
        if fails and x > 0.1:
            raise ValueError("planned")

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return (self.weight * 0).sum() + self.value


class Large(nn.Module):
    """Has no memory for more than `most` samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.net, self.most = nn.Linear(16, 10), most

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.net(inputs.flatten(1))


def trouble(how: str) -> None:
    if how == "raises":
        raise ValueError("planned")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "suspended":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exits":
        os._exit(0)
    if how in ("prints", "gigabyte"):
        for _ in range({"prints": 64, "gigabyte": 1024}[how]):
            os.write(1, b"x" * (1 << 20))
        os.write(1, b"\nthe end\n")
    if how == "removes":
        (folder,) = glob.glob(os.environ["SWEEP"])  # noqa: PTH207 - an absolute pattern
        shutil.rmtree(folder)
    if how == "forks" and not os.fork():
        time.sleep(600)
    if how == "hangs":
        time.sleep(600)
