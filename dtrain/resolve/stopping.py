"""Decides when a run ends early: `stop.metric` and what its best value is."""

from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import Config
from dtrain.errors import WordsError, nearest
from dtrain.resolve.declared import figures, may_have
from dtrain.resolve.sets import is_of_a_set, measured_on


def early(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's `stop`; empty if nothing ends the run early. Raises WordsError for a figure that no evaluation has."""
    asked = config.stop
    if asked.metric is None:
        return {"stop": {}}
    known = dict(figures(draft["objective"]))
    if config.ema:
        known |= {name.replace("eval_", "eval_ema_", 1): which for name, which in known.items()}
    subject = f"stop.metric={asked.metric}"
    is_best = _direction(config, draft, known)
    held = {name: value for name, value in config.data.items() if name.startswith("holdout")}
    sets = draft["evaluate_sets"]
    if held and not is_of_a_set(asked.metric, sets) and not any(held.values()):
        typed = measured_on("stop.metric", asked.metric, sets, config.data)
        raise WordsError(f"{subject}: nothing is held out to measure it on. Type {typed}.")
    if not config.evaluate.every:
        raise WordsError(
            f"{subject}: evaluate.every=0 leaves one evaluation, after the last step. Type evaluate.every=<steps>."
        )
    return {"stop": {"metric": asked.metric, "is_best": is_best, "patience": asked.patience, "least": asked.least}}


def _direction(config: Config, draft: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """Whether the lowest or highest value of `stop.metric` is the best: what is `known`, or what was typed for a figure
    that only the run knows.
    """
    metric, best_is = str(config.stop.metric), config.stop.best_is
    subject, stated = f"stop.metric={metric}", known.get(metric)
    if stated and best_is not in ("auto", stated):
        raise WordsError(f"stop.best_is={best_is}: of {metric} the {stated} is the best. Leave stop.best_is out.")
    if stated:
        return stated
    is_of_run = may_have(metric, config.objective)
    is_of_metric = f"eval_{metric}" not in known and metric.removeprefix("eval_") in draft["evaluate_metrics"]
    if not (is_of_run or is_of_metric):
        raise WordsError(f"{subject}: no evaluation of this run has this figure.{nearest(metric, known)}")
    if best_is == "auto":
        raise WordsError(
            f"{subject}: nothing says whether its lowest or highest value is the best. Type stop.best_is=lowest or "
            "highest."
        )
    return best_is
