"""The facts that predictions need from each part, and an example to state where one is missing."""

from collections.abc import Mapping

from dtrain.config.facts import fact
from dtrain.planned import Plan

NEEDED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "strategy": (("holds",), "'holds': 'copies'"),
    "precision": (("param", "compute", "reduce"), "'param': 'fp32', 'compute': 'bf16', 'reduce': 'fp32'"),
    "optim": (
        ("state", "needs", "copies"),
        "'state': {'every': ['whole', 'whole', 'count']}, 'needs': 'elements', 'copies': 2",
    ),
    "remat": (("keeps",), "'keeps': 'inputs'"),
    "compile": (("keeps", "moves"), "'keeps': 'all', 'moves': 8"),
}
"""Group -> (required facts, an example)."""
SHARDS = (("holds", "reshard", "reduce"), "'holds': 'shards', 'reshard': 'forward', 'reduce': 'last'")
"""The same for a strategy that shards state."""


def unstated(plan: Plan) -> str:
    """A sentence for each part that lacks a required fact; empty if none does."""
    sentences = []
    for group in NEEDED:
        part = getattr(plan, group)
        names, example = SHARDS if fact(part, "holds") == "shards" else NEEDED[group]
        missing = [name for name in names if fact(part, name) is None]
        if missing:
            sentences.append(
                f"{part['_target_']} does not state {', '.join(missing)}. Give its class facts such as about = "
                f"{{{example}}}, or its word in conf/{group}/ the same as _about_."
            )
    return " ".join(sentences)
