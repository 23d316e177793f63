"""Who else hears of the rows. A logger lives on rank 0, gets a copy, and can fail without the training noticing."""

from collections.abc import Mapping
from typing import Protocol


class Logger(Protocol):
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """The newest row, once per flush; evaluations come as rows of their own."""
        ...

    def note(self, text: str) -> None:
        """Something to read: a sample of text, a warning."""
        ...

    def close(self) -> None: ...
