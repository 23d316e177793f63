"""`epochs` instead of `steps`, and periods of an epoch: passes over training data, whose samples are counted before the
launch.

See it with `dtrain plan epochs=3 evaluate.every=epoch data=synthetic model=mlp objective=regression`.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.period import COUNTED, EPOCH, period_of
from dtrain.config.schema import Config
from dtrain.config.word import typed_at
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.resolve.counting import Count, count
from dtrain.resolve.unknown import UNKNOWN


def counts(config: Config) -> bool:
    """Whether words of this run need the number of its training samples."""
    return config.epochs is not None or bool(_periods(config))


def steps(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """Steps of the whole run, rounded up to a full last batch. Steps on the command line override epochs of a
    recipe.
    """
    typed = [key for key in ("epochs", "steps") if config.sources.get(key) == typed_at()]
    if config.epochs is None or typed == ["steps"]:
        return {"steps": config.steps}
    if len(typed) == 2:
        raise WordsError(
            f"epochs={config.epochs:g} and steps={config.steps} both set the length of the run. Leave one of them out."
        )
    batch = draft["batch"].size
    counted = _count(config, draft, f"epochs={config.epochs:g}", f"steps=<{config.epochs:g} x ")
    number = math.ceil(Fraction(str(config.epochs)) * counted.samples / batch)  # of floats, 0.1 x 30 / 3 may be above 1
    draft["why"]["steps"] = (
        f"{number} (auto: epochs={config.epochs:g} x {counted.samples} samples to train on / batch={batch}, rounded "
        f"up; {counted.where})"
    )
    return {"steps": number}


def periods(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """The steps of an epoch, where `evaluate.every` or `checkpoint.every` is one."""
    decided: dict[str, Any] = {}
    for key in _periods(config):
        counted, batch = _count(config, draft, f"{key}=epoch", f"{key}=<"), draft["batch"].size
        every = period_of(counted.samples, batch)
        draft["why"][key] = (
            f"every {float(Fraction(every)):.6g} steps (auto: an epoch, {counted.samples} samples to train on / "
            f"batch={batch}; {counted.where})"
        )
        group = key.partition(".")[0]
        decided |= {"evaluate_every": every} if group == "evaluate" else {group: {**draft[group], "every": every}}
    return decided


def _periods(config: Config) -> list[str]:
    """The keys whose period is an epoch."""
    checkpoint: Mapping[str, Any] = {} if config.checkpoint is UNKNOWN else config.checkpoint
    every = config.evaluate.every, checkpoint.get("every")
    return [key for key, value in zip(COUNTED, every, strict=True) if isinstance(value, str) and value == EPOCH]


def _count(config: Config, draft: Mapping[str, Any], word: str, instead: str) -> Count:
    """The samples to train on. Raises WordsError, with the begin of the word to type `instead`, if there are none or
    nobody knows.
    """
    try:
        counted = count(draft["data"], config.trust)
    except (PreflightError, StoreError, WordsError) as error:
        raise WordsError(
            f"{word}: the samples cannot be counted: {str(error).rstrip('.')}. Or type {instead}its training samples / "
            f"{draft['batch'].size}>, which needs no count."
        ) from error
    if counted.samples < 1:
        raise WordsError(f"{word}: {counted.where} is 0, so there is nothing to train on.")
    return counted
