"""Who else hears of the rows. A logger lives on rank 0, gets a copy, and can fail without the training noticing.

One that has `begin(facts)` is told first what decides the run: dotted key -> value, without secrets.
"""

from collections.abc import Mapping
from typing import Protocol


class Logger(Protocol):
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """The newest row, once per flush; evaluations and numbers of hooks come as rows of their own, all `eval_*`."""
        ...

    def note(self, text: str) -> None:
        """Something to read: a sample of text, a warning."""
        ...

    def close(self) -> None: ...
