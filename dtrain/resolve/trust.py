"""Refuses untrusted code: a recipe may come from anywhere, so a `_target_` runs only if it belongs to dtrain, torch or
a package that the user trusts (`dtrain.config.trust`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import HOLD_DATA, LISTED, NAMED, Config, Schema
from dtrain.config.trust import NAME, allowed, refusal
from dtrain.config.word import typed_at
from dtrain.resolve.unknown import UNKNOWN
from dtrain.secrets import masked


def targets(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Refuse every target whose dotted name is not on the allow-list; `dtrain.build` checks the object again."""
    values = {field.name: getattr(config, field.name) for field in fields(Schema)}
    parts = {name: vars(value) if is_dataclass(value) else value for name, value in values.items()}
    named = {key: config.options[group] for key, group in NAMED.items()}
    every = [*_targets(parts), *_targets(named), ("loop", config.loop)]
    known = [(key, name) for key, name in every if name is not UNKNOWN]
    unknown = {key: name for key, name in known if not allowed(name, _group_of(key), config.trust)}
    packages = [name.split(".")[0] for name in unknown.values() if NAME.fullmatch(name)]
    needed = [*config.trust, *(package for package in sorted({*packages}) if package not in ("dtrain", "torch"))]
    yield from (refusal(key, name, needed, _file(config, key)) for key, name in unknown.items())


def _file(config: Config, key: str) -> str:
    """The file that a value is from; empty if it was typed."""
    names = key.split(".")
    above = (".".join(names[:end]) for end in range(len(names), 0, -1))
    source = next((config.sources[each] for each in above if each in config.sources), "")
    return "" if source == typed_at() else masked(source)


def _group_of(key: str) -> str:
    """The group of whose words a dotted key takes one."""
    of_data = dict.fromkeys(HOLD_DATA, "data")
    return next((group for name, group in (LISTED | of_data).items() if key.startswith(f"{name}.")), key.split(".")[0])


def _targets(node: Any, key: str = "") -> Iterable[tuple[str, str]]:
    inside = dict(enumerate(node)) if isinstance(node, list | tuple) else node
    for name, value in inside.items() if isinstance(inside, Mapping) else ():
        if name == "_target_":
            yield f"{key}._target_".removeprefix("."), str(value)
        elif isinstance(value, Mapping | list | tuple):
            yield from _targets(value, f"{key}.{name}")
