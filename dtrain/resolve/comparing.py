"""Checks an objective that compares the model with another one, or takes its samples in another shape than the data has
them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about
from dtrain.config.schema import Config


def pairs(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> Iterable[str]:
    """Check data and mesh for an objective of pairs. The shape of a user's own samples shows in the first batch."""
    if not about(draft["objective"]).get("pairs"):
        return
    word, facts = f"objective={config.choices['objective']}", about(config.data)
    if facts.get("gives") in ("tokens", "any") and not facts.get("pairs"):
        yield (
            f"{word} takes pairs of a chosen and a rejected answer, and data={config.choices['data']} has none. Type "
            "data=chat data.path=<rows with chosen and rejected>, or data=dataset for pairs of your own."
        )
    if draft["mesh"].cp > 1:
        yield (
            f"{word}: the loss of a pair needs whole rows, and mesh.cp={draft['mesh'].cp} splits them. Leave mesh.cp "
            "out, or type mesh.tp for long rows."
        )
