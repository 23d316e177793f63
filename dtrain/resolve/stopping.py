"""Decides when a run ends early: `stop.metric` and what its best value is."""

from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import Config
from dtrain.errors import WordsError, nearest
from dtrain.resolve.declared import figures


def early(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's `stop`; empty if nothing ends the run early. Raises WordsError for a figure that no evaluation has."""
    asked = config.stop
    if asked.metric is None:
        return {"stop": {}}
    known = dict(figures(draft["objective"]))
    if config.ema:
        known |= {name.replace("eval_", "eval_ema_", 1): which for name, which in known.items()}
    subject = f"stop.metric={asked.metric}"
    if asked.metric not in known:
        is_named = f"eval_{asked.metric}" in known
        if not is_named and asked.metric.removeprefix("eval_") in draft["evaluate_metrics"]:
            raise WordsError(
                f"{subject}: its class does not say whether its lowest or highest value is the best. Type another "
                "metric, such as stop.metric=eval_loss."
            )
        raise WordsError(f"{subject}: no evaluation of this run has this figure.{nearest(asked.metric, known)}")
    held = {name: value for name, value in config.data.items() if name.startswith("holdout")}
    is_of_a_set = asked.metric.startswith(tuple(f"eval_{name}_" for name in draft["evaluate_sets"]))
    if held and not is_of_a_set and not any(held.values()):
        raise WordsError(f"{subject}: nothing is held out to measure it on. Type data.{next(iter(held))}=0.1.")
    if not config.evaluate.every:
        raise WordsError(
            f"{subject}: evaluate.every=0 leaves one evaluation, after the last step. Type evaluate.every=<steps>."
        )
    stop = {"metric": asked.metric, "is_best": known[asked.metric], "patience": asked.patience, "least": asked.least}
    return {"stop": stop}
