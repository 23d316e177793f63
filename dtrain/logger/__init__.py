"""Loggers: they live on rank 0, get copies of what the run writes, and can fail without affecting the training.

A class that derives from `Logger` says what it wants: what it leaves out does nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """A run as a logger is told of it first; no secret is in it."""

    name: str
    """The run's: of its folder, or of a job in a sweep the values that are its own."""
    group: str
    """The name of the sweep that it is a job of; empty."""
    out: str
    words: Mapping[str, str]
    """Dotted key -> text of what was typed."""
    settings: Mapping[str, Any]
    """Dotted key -> value of what the plan decided."""
    every: int
    """Steps between two flushes of the log."""
    rows: str
    """A local file that has a row for each step, as JSON; a step that is done again has its newest."""
    events: str
    """A local file of events: evaluations, samples of text, checkpoints."""


class Logger:
    """The protocol. Rank 0 builds a logger with `out` and `steps`, and calls each method."""

    def begin(self, facts: Facts) -> None:
        """The run begins, or goes on."""

    def back(self, step: int) -> None:
        """Training goes on after `step`: at each start, and when steps were undone. Later rows come again."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """The newest row, once per flush; evaluations and metrics of hooks come as rows of their own, all `eval_*`."""

    def text(self, step: int, name: str, text: str) -> None:
        """A sample of text from the hook `name`, or a `note` of the run."""

    def end(self, result: Mapping[str, Any]) -> None:
        """The run ends: `status` and `step`, and if it did not fail what result.json has; `error` if it did."""


@dataclass(frozen=True)
class FunctionLogger(Logger):
    """A function of step and row as a logger."""

    function: Callable[[int, Mapping[str, float]], object]
    out: str
    steps: int

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.function(step, values)
