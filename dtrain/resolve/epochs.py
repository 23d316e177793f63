"""`epochs` instead of `steps`: passes over training data whose length is known before launch.

See it with `dtrain plan epochs=3 data=synthetic model=mlp objective=regression`. Of data=chat the rows of local files
are counted by their index, which the run needs too.
"""

import math
from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config.facts import about
from dtrain.config.schema import Config
from dtrain.config.word import typed_at
from dtrain.errors import PreflightError, StoreError, WordsError
from dtrain.resolve.declared import dataset


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
    length, batch = _length(config.data), draft["batch"].size
    if length is None:
        if about(config.data).get("chat"):
            raise WordsError(_uncounted(config, batch))
        own = ", or give the class of the dataset about = {'samples': <its length>}" * bool(config.data.get("dataset"))
        raise WordsError(
            f"epochs={config.epochs:g}: data={config.word('data')} does not say before launch how many samples it "
            f"has. Type steps=<{config.epochs:g} x its training samples / {batch}>{own}."
        )
    count = math.ceil(config.epochs * length / batch)
    draft["why"]["steps"] = f"{count} (auto: epochs={config.epochs:g} of {length} samples, {batch} a step)"
    return {"steps": count}


def _length(part: Mapping[str, Any]) -> int | None:
    """Number of training samples, from the argument that the word names or from the class of the dataset, without the
    samples held out for evaluation.
    """
    stated = part.get(str(about(part).get("length")))
    if isinstance(stated, int):
        return stated
    whole: int | None = _rows(part) if about(part).get("chat") else dataset(part.get("dataset")).get("samples")
    holdout = part.get("holdout")
    apart = part.get("holdout_dataset") is not None
    if whole is None or not isinstance(holdout, int | float) or not holdout or apart:
        return whole
    return whole - min(max(1, round(whole * holdout)), whole - 1)


def _rows(part: Mapping[str, Any]) -> int | None:
    from dtrain.chat import files  # numpy

    if "???" in (part.get("path"), part.get("tokenizer")):
        return None
    try:
        return files.rows(part)
    except (PreflightError, StoreError) as error:
        raise WordsError(str(error)) from error


def _uncounted(config: Config, batch: int) -> str:
    """Why the samples of conversations cannot be counted, and what to type."""
    why, instead = "its files are not on this machine", ""
    if config.data.get("packing") == "pack":
        why, instead = "how many windows data.packing=pack fills is known when all rows are tokens", ""
    elif config.data.get("long") == "skip":
        why, instead = "which rows data.long=skip leaves out is known when all are tokens", ", or data.long=cut"
    return f"epochs={config.epochs:g}: {why}. Type steps=<{config.epochs:g} x its training samples / {batch}>{instead}."
