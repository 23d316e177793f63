"""`model.task=auto`: what the head of a model of transformers is for, as objective, data or its config.json says."""

import json
from dataclasses import replace
from typing import Any

from dtrain.config.facts import about
from dtrain.config.heads import architecture, task_of
from dtrain.config.schema import Config
from dtrain.errors import PreflightError, StoreError
from dtrain.resolve.rowtext import ROWS
from dtrain.resolve.unknown import UNKNOWN

IMAGES = ("images", "webdataset")
"""The fact `files` of data of pictures."""
UNTOLD = "causal_lm"
"""Where nothing says it: most models that are named are of that kind."""


def told(config: Config) -> tuple[Config, list[str]]:
    """The config with the task; and the problem if the model's own head is for none and the data does not say it."""
    model: Any = config.model
    if model is UNKNOWN or config.data is UNKNOWN or config.objective is UNKNOWN or model.get("task") != "auto":
        return config, []
    asked = _asked(config)
    name = "" if asked else _class(str(model["name"]), is_read_from_hub=about(config.data).get("gives") != "tokens")
    task = asked or task_of(name)
    if name and task is None and about(config.data).get("gives") == "samples":
        tasks = ", ".join(about(model)["reads"])
        return config, [f"model.name={model['name']}: its class is {name}. Type model.task=<one of {tasks}>."]
    return replace(config, model={**model, "task": task or UNTOLD}), []


def _asked(config: Config) -> str | None:
    """The task that the objective and the data leave; None where several are."""
    data, objective = config.data, config.choices["objective"]
    if objective == "masked":
        return "masked_lm"
    if objective == "dpo":
        return "causal_lm"
    if about(data).get("files") in ROWS and data.get("tokenizer"):
        return "classification"
    if objective in ("classification", "auto") and about(data).get("files") in IMAGES:
        return "image_classification"
    return None


def _class(name: str, *, is_read_from_hub: bool) -> str:
    """The class that config.json names; empty if it cannot be read, which is told where the model is built."""
    from dtrain.storage import hub, store

    try:
        place = hub.place(name)
        is_of_the_hub = place.startswith(hub.SCHEME)
        if is_of_the_hub and not is_read_from_hub:
            return ""
        text = hub.read(place, "config.json") if is_of_the_hub else store.read(store.join(place, "config.json"))
        described = json.loads(text)
    except (StoreError, PreflightError, ValueError, RecursionError):
        return ""
    return architecture(described) if isinstance(described, dict) else ""
