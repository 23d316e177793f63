"""Refuses loggers of the user's own with the methods that loggers had before `dtrain.logger.Logger` was declared."""

from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.build import received
from dtrain.cluster import Cluster
from dtrain.config.schema import Config
from dtrain.resolve.signature import lineage
from dtrain.resolve.source import DEFINITIONS
from dtrain.resolve.values import parts_of

NEW = {"log": "scalars(step, values)", "note": "text(step, name, text)", "close": "end(result)"}
"""Method of before -> its declaration now."""


def methods(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check that loggers have the methods of a Logger."""
    for path, part in parts_of(config, "logger"):
        thing = received(part)
        names = {*dir(thing)} if thing is not None else _defined(str(part.get("_target_", "")))
        if "log" in names and "scalars" not in names:
            moved = ", ".join(f"{name} is now {new}" for name, new in NEW.items() if name in names)
            yield (
                f"{path}: its methods are those of a logger of before: {moved}. Derive it from dtrain.logger.Logger, "
                "which has what it leaves out. Type dtrain logger --help."
            )


def _defined(target: str) -> set[str]:
    """The names of the methods of a class and of its bases; empty for a word of dtrain."""
    if target.startswith("dtrain."):
        return set()
    return {
        statement.name for _, kind in lineage(target) for statement in kind.body if isinstance(statement, DEFINITIONS)
    }
