"""A public config, told by its facts."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One file of another tool: what it sets, what the printed command asks for and is given, and what training that is."""

    source: str
    """Repository, its commit behind @ where it matters, and path."""
    said: Any
    """The tree of the file; of a Python file its text, as we would write it."""
    typed: dict[str, Any]
    """For each placeholder of the command, and for none other."""
    means: dict[str, Any]
    refused: list[str] = field(default_factory=list)
    """Keys that are refused by name though training depends on them, or that run it elsewhere."""
