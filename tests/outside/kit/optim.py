"""Two optimizers: one of torch's behind a function that says so, and one of its own."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn


def plain(*, model: nn.Module, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr)


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675."""

    about: ClassVar = {"state": {"every": ["whole"]}, "needs": "elements", "copies": 2}

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    momentum = state.setdefault("momentum", torch.zeros_like(p))
                    p.sub_(group["lr"] * momentum.lerp(p.grad, 0.1).sign())
                    momentum.lerp_(p.grad, 0.01)


def lion(*, model: nn.Module, lr: float) -> Lion:
    return Lion(model.parameters(), lr)


def silent(*, model: nn.Module, lr: float):  # type: ignore[no-untyped-def]
    return Lion(model.parameters(), lr)
