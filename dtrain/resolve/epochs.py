"""`epochs` instead of `steps`: passes over training data, whose samples are counted before the launch.

See it with `dtrain plan epochs=3 data=synthetic model=mlp objective=regression`.
"""

import math
from fractions import Fraction
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.schema import Config
from dtrain.config.word import typed_at
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.resolve.counting import count


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
    try:
        samples, where = count(draft["data"], config.trust)
    except (PreflightError, StoreError, WordsError) as error:
        raise WordsError(
            f"epochs={config.epochs:g}: the samples cannot be counted: {str(error).rstrip('.')}. Or type steps="
            f"<{config.epochs:g} x its training samples / {batch}>, which needs no count."
        ) from error
    if samples < 1:
        raise WordsError(f"epochs={config.epochs:g}: {where} is 0, so there is nothing to train on.")
    number = math.ceil(Fraction(str(config.epochs)) * samples / batch)  # of floats, 0.1 x 30 / 3 may be above 1
    draft["why"]["steps"] = (
        f"{number} (auto: epochs={config.epochs:g} x {samples} samples to train on / batch={batch}, rounded up; "
        f"{where})"
    )
    return {"steps": number}
