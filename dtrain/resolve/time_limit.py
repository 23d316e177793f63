"""How long a run may take by the clock."""

from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.constraints import CLOCK
from dtrain.config.schema import Config
from dtrain.errors import WordsError


def clock(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """`time_limit` in seconds, of which `grace` are left for the save."""
    limit = seconds(config.time_limit)
    if limit is not None and limit <= config.grace:
        raise WordsError(
            f"time_limit={config.time_limit} leaves nothing beside grace={config.grace:g}, the seconds kept for the "
            "save. "
            f"Type time_limit={config.grace + 60:g}, or a smaller grace."
        )
    return {"time_limit": limit, "grace": float(config.grace)}


def seconds(said: Any) -> float | None:
    """3600, 60:00, 1:00:00 and 0-01:00:00 are the same; None for what is no time."""
    try:
        return float(said)
    except (TypeError, ValueError):
        found = CLOCK.fullmatch(str(said))
    if not found:
        return None
    days, hours, minutes, rest = (float(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
