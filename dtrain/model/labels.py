"""A model of transformers beside the data that it is trained on: images of the size that it takes, and the names of its
classes.
"""

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtrain.errors import WordsError, an


def fit(model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Give the configuration of a classifier the names of the data's classes, and note outputs that no class has. A
    model of others is left as it is. Raises WordsError for images of another size than the model takes, and for a head
    with fewer outputs than the data has classes.
    """
    config: Any = getattr(model, "config", None)
    if not _is_of_transformers(model):
        return
    _check_images(model, facts.get("inputs"))
    if not type(model).__name__.endswith("Classification"):
        return
    names, classes = facts.get("class_names"), facts.get("outputs") or 0
    if names and len(names) == config.num_labels:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    new = "model.head=new " if any(parameter.is_meta for parameter in model.parameters()) else ""
    differ = f"the head of the model has {config.num_labels} outputs and the data {classes} classes"
    instead = f"ype {new}model.config={{num_labels: {classes}}}."
    if 1 < config.num_labels < classes:
        raise WordsError(f"model: {differ}. T{instead}")
    if 1 < classes < config.num_labels:
        vars(model)["_notes"] = [
            f"{differ}: it learns that the others do not occur, and the names of the classes are not used. For a head "
            f"with as many t{instead}"
        ]


def names_in(model: nn.Module) -> list[str] | None:
    """The names of the classes that the configuration of a model of transformers has (`id2label`); None if it has none
    of its own.
    """
    config: Any = getattr(model, "config", None)
    if not _is_of_transformers(model) or config.id2label == {number: f"LABEL_{number}" for number in config.id2label}:
        return None
    named = {int(number): str(name) for number, name in config.id2label.items()}
    return [named[number] for number in range(len(named))] if named.keys() == {*range(len(named))} else None


def _is_of_transformers(model: nn.Module) -> bool:
    return "transformers" in sys.modules and isinstance(model, sys.modules["transformers"].PreTrainedModel)


def notes(model: nn.Module) -> list[str]:
    """Sentences about a model and its data."""
    return list(vars(model).get("_notes", ()))


def _check_images(model: Any, shape: Any) -> None:
    """Raises WordsError if the part of the model that reads images refuses those of the data."""
    if not isinstance(shape, list) or len(shape) != 3:
        return
    for module in model.modules():
        size = getattr(module, "image_size", None)
        if size is None or not type(module).__name__.endswith("Embeddings"):
            continue
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        try:
            with torch.no_grad(), torch.random.fork_rng([]), contextlib.suppress(TypeError, RuntimeError):
                module(torch.zeros(1, *shape, device=device))
        except ValueError:  # which it raises for sizes alone
            height, width = size if isinstance(size, tuple | list) else (size, size)
            channels = getattr(model.config, "num_channels", shape[0])
            takes, makes = f"{height} x {width}", f"{shape[1]} x {shape[2]}"
            if (height, width) == tuple(shape[1:]) and channels == shape[0]:
                continue
            asked = f"data.size={height}" if height == width else f"data.size=[{height}, {width}]"
            asked += f" data.colors={'rgb' if channels == 3 else 'grey'}" if channels != shape[0] else ""
            other = "" if device.type == "meta" else f", or model.config={{image_size: {shape[1]}}}"
            raise WordsError(
                f"model: {an(model)} takes images of {takes} pixels and {channels} channel(s), and the "
                f"data has {makes} and {shape[0]}. Type {asked}{other if shape[1] == shape[2] else ''}."
            ) from None
