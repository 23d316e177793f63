"""Constructors of the rows of the schema."""

from copy import copy
from dataclasses import field
from typing import Any


def key(allowed: Any, default: Any, sentence: str, scope: str = "") -> Any:
    """One row of the schema: allowed values (in the syntax of dtrain/config/constraints.py), default, meaning, and
    scope, any of

        mesh   depends on the machine: another verb that reads the run chooses its own
        aside  does not affect results: a run with another value is the same run
        typed  set by the user only, never by a recipe
        open   a recipe from elsewhere may set it: it says what is trained
        closed it may not: it says where or how processes start, or where bytes go. A row without either is closed.
    """
    options = {"default_factory": lambda: copy(default)} if isinstance(default, list | dict) else {"default": default}
    return field(**options, metadata={"allowed": allowed, "sentence": sentence, "scope": scope})


def section(kind: type, sentence: str, scope: str = "") -> Any:
    """Rows with a common prefix."""
    return field(default_factory=kind, metadata={"sentence": sentence, "scope": scope})


def group(word: str | list[str], scope: str = "") -> Any:
    """A folder of conf/ with its default `word`."""
    return field(default_factory=dict, metadata={"word": word, "scope": scope})
