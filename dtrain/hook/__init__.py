"""Hooks: observers of a run. A hook gets a snapshot and a period, nothing else: it cannot change the training."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from dtrain.data import Source
from dtrain.errors import WordsError, an
from dtrain.secrets import masked

EVENT = ("time", "event", "step")


@dataclass(frozen=True)
class StepInfo:
    """The snapshot after step `step` of `steps`. `forward` runs the model without gradients, in evaluation mode; all
    ranks must call it alike.
    """

    step: int
    steps: int
    seen: int
    seed: int
    loss: Tensor
    """This rank's sum over its part of the batch, undivided."""
    norm: Tensor
    lr: float
    source: Source
    forward: Callable[[Any], Any]
    model: Callable[[], nn.Module]
    """Makes a whole copy of the model on the CPU, in evaluation mode and without gradients; all ranks must call it
    alike. Nothing is gathered unless it is called.
    """
    weights: Callable[[], dict[str, Tensor]]
    """The same without a module: name -> whole parameter or buffer, on the CPU."""
    epoch: int | None
    """Passes over the training data that are complete; None if it does not say its length."""


class Hook(Protocol):
    """A class may state its metrics and whether more is better, `about = {"figures": {"eval_f1": "highest"}}`;
    `{"figures": {}}`: none.
    """

    @property
    def every(self) -> int | Literal["epoch"]:
        """Steps between calls; the last step always calls it. 0: only the last; epoch: each step that ends a pass over
        the training data.
        """
        ...

    def __call__(self, info: StepInfo) -> Mapping[str, Any] | None:
        """All ranks call it. The return value of rank 0 becomes an event; its entry `text` is printed, and its numbers
        become columns of the step's row in metrics.jsonl, and metrics, named as in `figure`.
        """
        ...


@dataclass(frozen=True)
class FunctionHook:
    """A function of the snapshot as a hook."""

    function: Callable[[StepInfo], Mapping[str, Any] | None]
    every: int | Literal["epoch"] = 1

    def __call__(self, info: StepInfo) -> Mapping[str, Any] | None:
        return self.function(info)


def epochs(source: Source, seen: int) -> int | None:
    """The passes over the data of which `seen` samples are complete; None if it does not say its length."""
    try:
        return seen // len(source)
    except (TypeError, ZeroDivisionError):
        return None


def plain(returned: Mapping[str, Any] | None, hook: str) -> dict[str, Any]:
    """The return value of a hook, with 0-dim tensors and arrays as numbers. Raises WordsError unless it is a mapping of
    names.
    """
    returned = {} if returned is None else returned
    if not isinstance(returned, Mapping) or not all(isinstance(name, str) for name in returned):
        raise WordsError(
            f"hook {hook} returned {an(returned)}, of which no event can be made. Let it return None, or "
            "a dict with names as keys."
        )
    values = {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in returned.items()}
    for name, value in values.items():
        if name in EVENT:
            raise WordsError(f"hook {hook} returned {name}, which every event has already. Call it something else.")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise WordsError(
                f"hook {hook} returned {name} as {an(value)}, of which no event can be made. Let it be a "
                "number, a text, or lists of them (.tolist())."
            ) from error
    return values


def gives_none(hook: Hook) -> bool:
    """Whether its class states that it returns no metrics."""
    return getattr(type(hook), "about", {}).get("figures") == {}


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are numbers, except those whose name is that of a secret."""
    named = {name: value for name, value in values.items() if masked(name) == name and not isinstance(value, bool)}
    return {name: float(value) for name, value in named.items() if isinstance(value, int | float)}


def figure(name: str) -> str:
    """The metric that a number of a hook becomes."""
    return f"eval_{name.removeprefix('eval_')}"
