"""Refuses untrusted code: a recipe may come from anywhere, so a `_target_` runs only if it belongs to dtrain, torch or
a package that the user trusts (`dtrain.config.trust`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import NAMED, Config, Schema
from dtrain.config.trust import allowed, refusal
from dtrain.resolve.unknown import UNKNOWN


def targets(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Refuse every target whose dotted name is not on the allow-list; `dtrain.build` checks the object again."""
    parts = {field.name: getattr(config, field.name) for field in fields(Schema)}
    named = {key: config.options[group] for key, group in NAMED.items()}
    for key, name in [*_targets(parts), *_targets(named), ("loop", config.loop)]:
        if name is not UNKNOWN and not allowed(name, key.split(".")[0], config.trust):
            yield refusal(key, name)


def _targets(node: Any, key: str = "") -> Iterable[tuple[str, str]]:
    inside = vars(node) if is_dataclass(node) else node
    inside = dict(enumerate(inside)) if isinstance(inside, list | tuple) else inside
    for name, value in inside.items() if isinstance(inside, Mapping) else ():
        if name == "_target_":
            yield f"{key}._target_".removeprefix("."), str(value)
        else:
            yield from _targets(value, f"{key}.{name}")
