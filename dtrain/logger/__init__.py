"""Loggers: they live on rank 0, get copies of the rows, and can fail without affecting the training.

One with `begin(facts)` first gets the settings of the run: dotted key -> value, without secrets. One with `back(step)`
learns that training goes on after `step`: at a start, and when it was rewound. Later rows come again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Logger(Protocol):
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the newest row, once per flush; evaluations and metrics of hooks come as rows of their own, all
        `eval_*`.
        """
        ...

    def note(self, text: str) -> None:
        """Log a text: a sample, a warning."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class FunctionLogger:
    """A function of step and row as a logger."""

    function: Callable[[int, Mapping[str, float]], object]
    out: str
    steps: int

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.function(step, scalars)

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...
