"""The facts of a part: properties that its word states in `_about_`, or its class in `about`. Decisions and predictions
depend on these, never on a name.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dtrain.config import constraints
from dtrain.errors import nearest

Part = Mapping[str, Any]
"""`{"_target_": "dtrain.optim.adamw.build", **arguments}`: plain data until a rank builds it."""

KEPT = ("whole", "rows", "columns", "count")
"""Kinds of optimizer state per parameter: of its shape, one number per row or column, or one number."""
OF = ("hidden", "matrices", "every")
"""Classes of parameters with the same optimizer state: hidden matrices, other matrices, every parameter."""
_KEEPS = ["all", "products", "inputs"]
_NUMBERS = ["fp32", "bf16", "fp16"]
FACTS: Mapping[str, Mapping[str, Any]] = {
    "strategy": {
        "fill": ["pp", "dp_replicate", "dp_shard", "cp", "tp"], "inside": ["dp_shard"], "holds": ["copies", "shards"],
        "reshard": ["forward", "never"], "reduce": ["last", "every"], "offload": ["none", "cpu"], "buckets": "bool",
        "try": "bool",
    },
    "precision": {
        "param": _NUMBERS, "compute": _NUMBERS, "reduce": _NUMBERS, "flops": [*_NUMBERS, "tf32", "fp8"],
        "device": ["cpu", "cuda"], "scale": "any", "try": "bool",
    },
    "optim": {
        "state": "mapping", "needs": ["elements", "matrices", "statistics"], "copies": "number >= 0", "fused": "bool",
        "beside": "number >= 0", "wide": "bool", "decays": ["matrices"],
    },
    "adapter": {"trains": ["all", "adapter"], "packs": "bool"},
    "remat": {"keeps": _KEEPS, "share": "number >= 0 and <= 1", "try": "bool"},
    "compile": {"keeps": _KEEPS, "moves": "number > 0", "most": "int >= 1"},
    "backend": {"device": ["cpu", "cuda"], "started_by": "list of text"},
    "model": {
        "arithmetic": "text", "takes": ["tokens", "image", "features"], "halves": "text", "matrices": "bool",
        "blocks": "list of text", "tp": "list of text", "sequence": "bool", "multiples": "mapping",
        "at_most": "mapping", "reads": "mapping", "weights_at": "text", "residual": ["compute"],
    },
    "pipeline": {
        "stages": "int >= 1", "more": "bool", "layout": ["loop", "v"], "least": "int >= 0", "rounds": "bool",
        "splits_backward": "bool", "keeps": ["all"], "runner": "text", "try": "bool",
    },
    "objective": {
        "task": ["next_token", "classification", "regression"], "metrics": "list of text",
        "needs": ["tokens", "text"], "whole": "bool", "alike": "bool", "pairs": "bool", "masks": "bool",
        "reference": ["start", "teacher"], "logs": "bool",
    },
    "hook": {"needs": ["text"]},
    "logger": {"package": "text", "sends": "bool"},
    "metric": {"tasks": "list of text", "classes": "int >= 1"},
    "data": {
        "gives": ["tokens", "samples", "any"], "dense": "bool", "loading": ["thread", "block", "step"],
        "length": "text", "text": "bool", "parts": "text", "vocab_of": "mapping", "inputs": "any",
        "replayed": "bool", "joins": "bool",
        "files": ["tokens", "jsonl", "csv", "parquet", "hf", "chat", "images", "webdataset"], "targets": "any",
        "chat": "bool", "pairs": "bool", "cpus": "int >= 1", "samples": "int >= 1", "outputs": "int >= 1",
        "vocab": "int >= 1",
    },
    "launcher": {
        "where": ["here", "around", "elsewhere"], "most": "int >= 1", "detached": "bool", "here": "int >= 1",
    },
}  # fmt: skip
"""Group -> fact -> allowed values, in the syntax of dtrain/config/constraints.py."""
SHARED: Mapping[str, Mapping[str, Any]] = {"model": {"freeze": "list of text"}}
"""Group -> argument that every part of it takes, also one of the user's own, because dtrain acts on it -> its allowed
values.
"""
OF_ALL: Mapping[str, Any] = {
    "allowed": "mapping",
    "calls": "list of text",
    "figures": "mapping",
    "only_with": "mapping",
    "open": "list of text",
    "closed": "list of text",
    "code": "list of text",
}
"""Facts of a part of any group. `open`, `closed`: arguments that a recipe from elsewhere may set, and may not
(dtrain/config/permission.py); `code`: arguments whose values are run as a command.
"""
EACH: Mapping[str, Any] = {
    "figures": ["lowest", "highest"], "multiples": "list of text", "at_most": "text", "vocab_of": "int >= 1",
    "only_with": "mapping",
}  # fmt: skip
"""Fact that is a mapping -> allowed values of each of its names."""


def wrong(group: str, facts: Any, arguments: Collection[str] | None = None) -> Iterator[tuple[Sequence[str], str]]:
    """The names that lead to each mistake in the facts of a part, and a sentence without its subject. `arguments`: all
    that may be `allowed`; None if they are not known.
    """
    if facts is None:
        return
    if not isinstance(facts, Mapping):
        yield (), f"states {facts!r}: facts are names with values, such as allowed: {{width: int >= 1}}."
        return
    known = {**OF_ALL, **FACTS.get(group, {})}
    for name, value in facts.items():
        if name not in known:
            yield [name], f"states {name}, which is no fact of {group}. Its facts are {', '.join(sorted(known))}."
        elif value is None and name not in EACH and name != "allowed":
            continue
        elif not constraints.fits(value, known[name]):
            yield [name], f"states {name}={value!r}: {name} is {constraints.say(known[name])}."
        elif name == "state" and not _is_state(value):
            yield (
                [name],
                f"states state={value!r}: it maps any of {', '.join(OF)} to a list of "
                f"{', '.join(KEPT)}, or {{'whole': 'momentum'}} if it depends on that argument; every is required.",
            )
        elif name == "allowed":
            yield from _wrong_constraints(value, arguments)
        elif name in EACH:
            for each, item in value.items():
                if not constraints.fits(item, EACH[name]):
                    yield (
                        [name, each],
                        f"states {name}.{each}={item!r}: each value of {name} is {constraints.say(EACH[name])}.",
                    )


def _wrong_constraints(
    allowed: Mapping[str, Any], arguments: Collection[str] | None
) -> Iterator[tuple[list[str], str]]:
    for name, value in allowed.items():
        if arguments is not None and name not in arguments:
            yield (
                ["allowed", name],
                f"states allowed.{name}, and there is no argument {name}.{nearest(name, arguments)}",
            )
        elif not constraints.is_one(value):
            yield (
                ["allowed", name],
                f"states allowed.{name}={value!r}: allowed values are written as in {', '.join(constraints.EXAMPLES)}.",
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


def allowed_of(part: Mapping[str, Any], name: str) -> Any:
    """The constraint on an argument: from the `_about_` of its word, otherwise the type of its default."""
    stated = (about(part).get("allowed") or {}).get(name)
    return constraints.of_type(part.get(name)) if stated is None else stated


def fact(part: Part, name: str, default: Any = None) -> Any:
    """One fact of a part; an argument of the same name, such as `reshard` of fsdp, takes precedence."""
    return part[name] if name in part else about(part).get(name, default)
