"""A recipe may come from anywhere, so a `_target_` runs only when it is dtrain's own, torch's, or of a package the user trusts."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import GROUPS, Config
from dtrain.errors import WordsError

OWN = re.compile(
    rf"dtrain\.({'|'.join(GROUPS)})\.\w+\.\w+|dtrain\.(train|evaluate|generate)\.\w+|dtrain\.testing\.faults\.AtStep|dtrain\.cluster\.Machine|torch\.(nn|optim)\.\w+"
)


def targets(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Refuses every target outside the allow-list, by its dotted name; `dtrain.build` checks the object behind it once more."""
    trusted = tuple(config.trust)
    problems = [
        f"{key}={name}: {name.split('.')[0]} is not trusted to run code. Type trust=[{name.split('.')[0]}] if it is yours."
        for key, name in _targets({group: getattr(config, group) for group in GROUPS} | {"loop": {"_target_": config.loop}})
        if not OWN.fullmatch(name) and name.split(".")[0] not in trusted
    ]
    if problems:
        raise WordsError(*problems)
    return {}


def _targets(node: Any, key: str = "") -> Iterable[tuple[str, str]]:
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else ()
    for name, value in items:
        if name == "_target_":
            yield f"{key}._target_".removeprefix("."), str(value)
        else:
            yield from _targets(value, f"{key}.{name}")
