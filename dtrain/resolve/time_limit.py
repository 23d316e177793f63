"""Time limit of a run."""

from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.constraints import CLOCK
from dtrain.config.schema import Config
from dtrain.errors import WordsError


def clock(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Decide `time_limit` in seconds, which includes `grace` seconds for the save."""
    limit = seconds(config.time_limit)
    if limit is not None and limit <= config.grace:
        raise WordsError(
            f"time_limit={config.time_limit} must be longer than grace={config.grace:g}, the seconds reserved for the "
            f"save. Type time_limit={config.grace + 60:g}, or a smaller grace."
        )
    return {"time_limit": limit, "grace": float(config.grace)}


def seconds(duration: Any) -> float | None:
    """Seconds of a duration: 3600, 60:00, 1:00:00 and 0-01:00:00 are the same; None for anything else."""
    try:
        return float(duration)
    except (TypeError, ValueError):
        match = CLOCK.fullmatch(str(duration))
    if not match:
        return None
    days, hours, minutes, rest = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
