"""Where a run is stored: the user's `out`, or a folder named after the words, so that the same words resume the same
run.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import Config, Schema, aside_rows, of_scope
from dtrain.config.word import cut, slug
from dtrain.errors import WordsError
from dtrain.secrets import screen


def where(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    out = config.out
    if out is None:
        out = f"outputs/{_name(config, 'model')}-{_name(config, 'data')}-{digest(config)}"
    if not out.strip("/ "):
        raise WordsError(f"out={out!r} is no place for a run. Type out=<a folder or URL>.")
    if "\n" in out or "\t" in out:
        instead = "".join(out.split())
        raise WordsError(f"out={cut(out)} is no place for a run. Type {screen.typed(f'out={instead}')}.")
    if out.startswith("memory://") and draft["nodes"] * draft["devices"] > 1:
        raise WordsError(
            f"out={out}: memory belongs to one process, this run has {draft['nodes'] * draft['devices']} ranks. Type "
            "out=<a folder or URL>."
        )
    return {"out": out.rstrip("/")}


def digest(config: Config, **more: Any) -> str:
    """8 digits that say what a run computes: of every key but those that change nothing of it, and of `more`."""
    aside = of_scope("aside")
    words = {field.name: getattr(config, field.name) for field in fields(Schema) if field.name not in aside}
    words = {name: _decisive(name, value) for name, value in words.items()}
    text = json.dumps({**words, **more}, sort_keys=True, default=vars)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _decisive(name: str, value: Any) -> Any:
    """A value, or the rows of a section that decide about results."""
    if not is_dataclass(value):
        return value
    return {row: each for row, each in vars(value).items() if f"{name}.{row}" not in aside_rows()}


def _name(config: Config, group: str) -> str:
    """The word of a group; for a user's own target the name of its class or function."""
    *_, last = names = str(getattr(config, group).get("_target_", group)).split(".")
    return slug([str(config.choices[group] or next((name for name in reversed(names) if name[:1].isupper()), last))])
