"""The facts of a part: properties that its word states in `_about_`, or its class in `about`. Decisions and predictions
depend on these, never on a name.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from dtrain.config import constraints

Part = Mapping[str, Any]
"""`{"_target_": "dtrain.optim.adamw.build", **arguments}`: plain data until a rank builds it."""

KEPT = ("whole", "rows", "columns", "count")
"""Kinds of optimizer state per parameter: of its shape, one number per row or column, or one number."""
OF = ("hidden", "matrices", "every")
"""Classes of parameters with the same optimizer state: hidden matrices, other matrices, every parameter."""
_KEEPS = ["all", "products", "inputs"]
FACTS: Mapping[str, Mapping[str, Any]] = {
    "strategy": {
        "fill": ["pp", "dp_replicate", "dp_shard", "cp", "tp"], "inside": ["dp_shard"], "holds": ["copies", "shards"],
        "reshard": ["forward", "never"], "reduce": ["last", "every"], "offload": ["none", "cpu"], "buckets": "bool",
    },
    "precision": {name: ["fp32", "bf16", "fp16"] for name in ("param", "compute", "reduce")},
    "optim": {
        "state": "mapping", "needs": ["elements", "matrices", "statistics"], "copies": "number >= 0", "fused": "bool",
    },
    "remat": {"keeps": _KEEPS},
    "compile": {"keeps": _KEEPS},
    "pipeline": {
        "stages": "int >= 1", "more": "bool", "layout": ["loop", "v"], "least": "int >= 0", "rounds": "bool",
        "splits_backward": "bool", "keeps": ["all"], "runner": "text",
    },
    "objective": {"task": ["next_token", "classification", "regression"], "metrics": "list of text"},
    "data": {"gives": ["tokens", "samples", "any"], "dense": "bool", "loading": ["thread", "block", "step"]},
    "launcher": {"where": ["here", "around", "elsewhere"], "most": "int >= 1", "detached": "bool"},
}  # fmt: skip
"""Group -> fact -> allowed values, in the syntax of dtrain/config/constraints.py."""


def wrong(group: str, part: Part) -> Iterator[str]:
    """A sentence for each fact with an invalid value."""
    for name, allowed in FACTS.get(group, {}).items():
        value = about(part).get(name)
        if value is None:
            continue
        if not constraints.fits(value, allowed):
            yield f"{part['_target_']} states {name}={value!r}: {name} is {constraints.say(allowed)}."
        elif name == "state" and not _is_state(value):
            yield (
                f"{part['_target_']} states state={value!r}: it maps any of {', '.join(OF)} to a list of "
                f"{', '.join(KEPT)}, or {{'whole': 'momentum'}} if it depends on that argument; every is required."
            )


def _is_state(value: Mapping[str, Any]) -> bool:
    lists = all(isinstance(entries, list | tuple) for entries in value.values())
    if not lists or "every" not in value or not all(kind in OF for kind in value):
        return False
    entries = [entry for kept in value.values() for entry in kept]
    names = [name for entry in entries for name in (entry if isinstance(entry, Mapping) else [entry])]
    return all(isinstance(name, str) and name in KEPT for name in names)


def about(part: Part) -> Mapping[str, Any]:
    """The facts of a part, without its arguments."""
    facts: Mapping[str, Any] = part.get("_about_") or {}
    return facts


def fact(part: Part, name: str, default: Any = None) -> Any:
    """One fact of a part; an argument of the same name, such as `reshard` of fsdp, takes precedence."""
    return part[name] if name in part else about(part).get(name, default)
