"""How the learning rate changes: a pure function of the step, so there is nothing to save."""

from typing import Protocol

from dtrain.optim import Optimizer


class Schedule(Protocol):
    def factor(self, step: int) -> float:
        """The factor of the learning rate in step `step`, counted from 0."""
        ...


def set_lr(optimizer: Optimizer, factor: float) -> dict[str, float]:
    """Scale every group's own learning rate. Returns `lr`, that of the first group, and `lr_<name>` of each that has a
    `name`, or else, as `lr_<index>`, another lr.
    """
    rates: dict[str, float] = {}
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = lr = group.setdefault("initial_lr", group["lr"]) * factor
        rates.setdefault("lr", lr)
        if "name" in group or lr != rates["lr"]:
            rates[f"lr_{group.get('name', index)}"] = lr
    return rates or {"lr": 0.0}


def steps_of(length: float, steps: int) -> float:
    """A length in steps; below 1 it is a part of the run."""
    return length * steps if length < 1 else length


def within(length: float, steps: int) -> float:
    """A length in steps, at most that of the run."""
    return min(steps_of(length, steps), steps)


def warmed(step: int, warmup: float) -> float:
    """Linear from 1 / warmup to 1."""
    return min(1.0, (step + 1) / warmup) if warmup > 0 else 1.0
