"""Words of different groups fit together: what the data gives, the model takes and the objective needs."""

import re
from collections.abc import Mapping
from typing import Any

from dtrain.cluster import Cluster
from dtrain.config import Config
from dtrain.errors import WordsError
from dtrain.plan import Part
from dtrain.resolve.ranks import about, choose

PARTS = ("remat", "model", "optim", "schedule", "checkpoint")
NATURAL = {"tokens": "next_token", "image": "classification", "features": "regression"}
"""What the model takes (or the data gives) -> the objective `auto` means."""


def objective(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """next_token for tokens, classification for images and labelled samples, regression for features."""
    gives, takes = about(config.data).get("gives", "samples"), about(config.model).get("takes")
    if gives == "tokens":
        word = "next_token"
    elif gives == "samples":
        word = "next_token" if takes == "tokens" else "classification"
    else:
        word = NATURAL.get(takes or "features", "regression")
    part = choose(config, "objective", word, draft["why"], f"the data gives {gives}, the model takes {takes or 'anything'}")
    needs, model, data = about(part).get("needs"), config.choices["model"], config.choices["data"]
    if gives == "tokens" and takes not in (None, "tokens"):
        raise WordsError(f"model={model} takes {takes}, data={data} gives tokens. Type model=gpt, or data=synthetic or data=dataset.")
    if gives == "any" and takes == "tokens" and needs != "tokens":
        raise WordsError(
            f"model={model} gives one answer per token, objective={config.choices['objective']} wants one per sample. Type objective=next_token."
        )
    if gives == "tokens" and needs != "tokens" and config.choices["objective"] is not None:
        raise WordsError(f"objective={config.choices['objective']} wants one answer per sample, data={data} gives tokens. Type objective=next_token.")
    if needs == "tokens" and takes not in (None, "tokens"):
        raise WordsError(f"objective=next_token needs a model of tokens, model={model} takes {takes}. Type model=gpt, or objective=classification.")
    return {"objective": part}


def synthetic(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """Data that can give anything is told what this run wants."""
    data = dict(config.data)
    if about(data).get("gives") == "any":
        needs = _word(draft["objective"])
        if data.get("task") == "auto":
            data["task"] = needs if needs in NATURAL.values() else NATURAL.get(about(config.model).get("takes") or "features", "regression")
        if data.get("inputs") == "auto":
            data["inputs"] = [1, 8, 8] if about(config.model).get("takes") == "image" else [64]
        if needs in NATURAL.values() and data["task"] != needs:
            raise WordsError(
                f"data.task={data['task']}: the objective of this run is {needs}. Type objective={data['task']}, or leave data.task out."
            )
    return {"data": data}


def _word(part: Part) -> str:
    """The word whose file holds the target of a part of ours; empty for one of the user's own."""
    found = re.fullmatch(r"dtrain\.\w+\.(\w+)\.\w+", str(part["_target_"]))
    return found[1] if found else ""


def hooks(config: Config, cluster: Cluster, draft: dict[str, Any]) -> dict[str, Any]:
    """`auto` samples text when the data is text; a hook that needs text is refused elsewhere."""
    text = bool(about(config.data).get("text"))
    chosen = {name: dict(part) for name, part in config.hook.items()}
    if config.choices["hook"] == "auto":
        chosen = {name: {**config.options["hook"].get(name, {}), **part} for name, part in chosen.items()}
        if text and "sample" not in chosen:
            chosen["sample"] = dict(config.options["hook"]["sample"])
        if text:
            draft["why"]["hook"] = f"{', '.join(chosen)} (auto: the data is text)"
    refused = [name for name, part in chosen.items() if about(part).get("needs") == "text" and not text]
    if refused:
        raise WordsError(f"hook={refused[0]} needs text, data={config.choices['data']} has none. Type hook=[].")
    return {"hooks": chosen}


def precision(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """A type that only some devices have is refused elsewhere."""
    needs = about(config.precision).get("device", draft["device"])
    if needs != draft["device"]:
        raise WordsError(f"precision={config.choices['precision']} needs {needs}, this run is on {draft['device']}. Type precision=bf16.")
    return {"precision": dict(config.precision)}


def parts(config: Config, cluster: Cluster, draft: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that no rule bends."""
    return {group: dict(getattr(config, group)) for group in PARTS} | {"loggers": {name: dict(part) for name, part in config.logger.items()}}
