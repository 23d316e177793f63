"""Targets of dtrain's words that have another name now: runs and recipes of before hold the old one."""

from collections.abc import Mapping
from typing import Any

MOVED: Mapping[str, str] = {
    "dtrain.data.text.Text": "dtrain.data.text.build",
    "dtrain.data.tokens.Tokens": "dtrain.data.tokens.build",
}


def current(node: Any) -> Any:
    """A copy of a mapping whose `_target_`s, at any depth, have the names of now."""
    if isinstance(node, list):
        return [current(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    return {key: MOVED.get(value, value) if key == "_target_" and isinstance(value, str) else current(value)
            for key, value in node.items()}  # fmt: skip
