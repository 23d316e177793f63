"""The best job of a sweep, which `recipe=<sweep>/best` names: of its finished jobs the one with the best metric that
its sweep.yaml states, or with the lowest held-out loss.
"""

import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import yaml

from dtrain.config.structure import TEXT, Each, fault
from dtrain.errors import StoreError, WordsError
from dtrain.report.runs import LARGEST, STREAMS
from dtrain.result import SHAPE, compared
from dtrain.secrets import screen
from dtrain.storage import store

LARGEST_SWEEP = 16 << 20
"""Most bytes of sweep.yaml."""


def job(root: str) -> str | None:
    """The URL of the best job of the sweep at `root`; None if there is no sweep. Raises WordsError if no job has
    finished, or if the sweep has two metrics; StoreError.
    """
    try:
        described = yaml.safe_load(store.beginning(store.join(root, "sweep.yaml"), LARGEST_SWEEP))
    except StoreError as error:
        if error.kind == "missing":
            return None
        raise
    except (yaml.YAMLError, ValueError, RecursionError):
        described = None
    study = described.get("study") if isinstance(described, dict) else None
    metrics, goals = ([], []) if fault(study, {"metrics": Each(TEXT), "goals": Each(TEXT)}) else _of(study)
    if len(metrics) > 1:
        raise WordsError(
            f"{root}/best: the sweep has {len(metrics)} metrics, and so no best job. Type dtrain sweep best "
            f"{screen.typed(root)}, and the name of a job instead of best."
        )
    metric, sign = (metrics or ["eval_loss"])[0], -1 if goals[:1] == ["max"] else 1
    values = {name: _value(result, metric) for name, result in _results(root).items()}
    known = {name: sign * value for name, value in values.items() if not math.isnan(value)}
    if not known:
        raise WordsError(f"{root}/best: no job of this sweep has finished with the metric {metric} yet.")
    return store.join(root, min(sorted(known), key=known.__getitem__))


def _of(study: Any) -> tuple[list[str], list[str]]:
    return study["metrics"], study["goals"]


def _value(result: Mapping[str, Any], metric: str) -> float:
    """A metric of a finished job, its best value if that is asked; NaN if it has none. `eval_loss` is the loss of the
    last batch where nothing is held out.
    """
    value = compared(result).get(metric, result["loss"] if metric in ("loss", "eval_loss") else None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _results(root: str) -> dict[str, Mapping[str, Any]]:
    """The name of each finished job -> its result.json."""
    names = [path.split("/")[0] for path in store.tree(root, depth=2) if path.endswith("/result.json")]
    with ThreadPoolExecutor(1 if store.is_local(root) else STREAMS) as pool:
        results = pool.map(lambda name: _result(store.join(root, name, "result.json")), names)
        return {name: result for name, result in zip(names, results, strict=True) if result}


def _result(url: str) -> Mapping[str, Any]:
    """The result of a finished job; empty for others, and if it is damaged."""
    try:
        result = json.loads(store.beginning(url, LARGEST))
    except (StoreError, ValueError, RecursionError):
        return {}
    whole = not fault(result, {**SHAPE, "metrics": SHAPE["metrics?"]})
    return result if whole and result["status"] == "finished" else {}
