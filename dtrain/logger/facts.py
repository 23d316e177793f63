"""The facts of a run that its loggers are told first."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import yaml

from dtrain.errors import StoreError
from dtrain.logger import Facts
from dtrain.planned import Plan
from dtrain.report.runs import changed_words
from dtrain.secrets.as_json import clean
from dtrain.storage import store

PARTS = (
    "model", "adapter", "data", "objective", "optim", "schedule", "precision", "strategy", "remat", "compile",
)  # fmt: skip
DECIDES = (*PARTS, "batch", "mesh", "nodes", "devices", "device", "steps", "seed", "clip", "ema")
"""Fields of the plan that loggers get."""


def facts(plan: Plan, *, rows: str = "", events: str = "") -> Facts:
    """`rows`, `events`: the local files that are written."""
    words: dict[str, str] = {}
    with suppress(StoreError):  # a rank without a launcher has no config.yaml
        words = changed_words(store.read(store.join(plan.out, "config.yaml")).decode(errors="replace"))[0]
    root, _, name = plan.out.rstrip("/").rpartition("/")
    swept = _swept(root)
    own = " ".join(f"{key}={words[key]}" for key in swept or () if key in words)
    group = root.rpartition("/")[2] if swept is not None else ""
    return Facts(
        name=own or name,
        group=group,
        out=plan.out,
        words=clean(words),
        settings=settings(plan),
        every=plan.log_every,
        rows=rows,
        events=events,
    )


def settings(plan: Plan) -> dict[str, Any]:
    """Dotted key -> value of the settings that decide numbers and speed of a run, without secrets."""
    values, found = plan.to_dict(), dict[str, Any]()
    left = [(name, values[name]) for name in DECIDES]
    while left:
        key, value = left.pop(0)
        if isinstance(value, Mapping):
            left += [(f"{key}.{name}", item) for name, item in value.items() if name != "_about_"]
        elif value is not None:
            found[key] = value
    redacted: dict[str, Any] = clean(found)
    return redacted


def _swept(root: str) -> list[str] | None:
    """The keys that the sweep at `root` gives its jobs; None if there is no sweep."""
    try:
        described = yaml.safe_load(store.read(store.join(root, "sweep.yaml")))
        return list(dict.fromkeys(key for space in described["spaces"] for key in space))
    except (StoreError, yaml.YAMLError, TypeError, KeyError):
        return None
