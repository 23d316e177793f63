"""Exports an adapter: as peft's files, or merged into its base, which is read again."""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtrain.adapter import merged, scaling_of
from dtrain.adapter.packed import rounded
from dtrain.checkpoint import base, others
from dtrain.checkpoint.commit import DamagedError
from dtrain.checkpoint.conversions import can_untie
from dtrain.checkpoint.destination import destination
from dtrain.checkpoint.export import (
    KINDS,
    as_saved,
    assembled,
    check_sizes,
    fill,
    write,
)
from dtrain.checkpoint.leaving import renamed
from dtrain.errors import StoreError, WordsError
from dtrain.storage import store

PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_NAMES = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
"""Name of a parameter that an adapter added -> its name in a file of peft."""
TASKS = {"ForCausalLM": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}
"""End of the name of a model of transformers -> peft's name of its task."""

Commit = Mapping[str, Any]


def as_peft(url: str, commit: Commit, to: str, *, weights: str, dtype: str | None, form: str | None) -> list[str]:
    """Write the adapter of a checkpoint to the folder `to` as peft does, and return the URLs of the files. Arguments
    and errors are those of `export`.
    """
    place = destination(to)
    place.refuse_existing(PEFT_WEIGHTS, PEFT_CONFIG)
    check_sizes(url, commit)
    named = {_called(layer, form): sources for layer, sources in _layers(url, commit, weights).items()}
    names = {
        f"base_model.model.{layer}.{PEFT_NAMES[name]}": source
        for layer, sources in named.items()
        for name, source in sources.items()
    }
    made = as_saved(url, commit, names, dtype)
    kinds, shapes = {name: one.dtype for name, one in made.items()}, {name: one.shape for name, one in made.items()}
    with assembled(place, PEFT_WEIGHTS, kinds, shapes) as targets:
        fill(url, commit, {source: targets[name] for name, source in names.items()})
    written = place.small(PEFT_CONFIG, json.dumps(_peft_config(commit, [*named]), indent=2).encode())
    place.finish()
    return [store.join(to, PEFT_WEIGHTS), written]


def _called(layer: str, form: str | None) -> str:
    """The name of a layer in the exported base. Raises WordsError."""
    there = renamed(f"{layer}.weight") if form else f"{layer}.weight"
    if there is None:
        raise WordsError(f"as={form}: {layer} has no place in a model of transformers. Leave as out.")
    return there.removesuffix(".weight")


def merge(
    url: str,
    commit: Commit,
    to: str,
    *,
    weights: str,
    dtype: str | None,
    shard: float = math.inf,
    form: str | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> list[str]:
    """Write the model that a checkpoint's adapter and its base are together, like `export`. Each weight is merged in
    the type in which it is saved. One that is tied to that of a layer with an adapter is written for itself.

    Raises StoreError too if the base is gone or was changed.
    """
    named = commit["facts"].get("base")
    place, whole, read = _whole(url, commit, named)
    check_sizes(url, commit)
    adapter = {f"model.{layer}": tensors for layer, tensors in _tensors(url, commit, weights).items()}
    added = {f"{layer}.{name}" for layer, tensors in adapter.items() for name in tensors}
    names = {name.removeprefix("model."): name for name in whole["tensors"] if name.startswith("model.")}
    names = {name: source for name, source in names.items() if source not in added}
    apart = {f"model.{name}": names[first] for name, first in written_apart(url, commit).items() if first in names}
    facts = _untied(url, commit["facts"]) if apart else commit["facts"]
    whole = {"tensors": {**whole["tensors"], **{name: whole["tensors"][source] for name, source in apart.items()}}}
    names |= {name.removeprefix("model."): name for name in apart}
    if lost := [layer for layer in adapter if f"{layer}.weight" not in names.values()]:
        raise StoreError.during("merge", url, f"its base {place} has no {lost[0].removeprefix('model.')}.weight")
    newer = {source for source in names.values() if source in commit["tensors"]} if named else set()  # buffers
    scaling, narrow = scaling_of(commit["facts"]["adapter"]), _packed(commit, adapter)
    nested = bool(commit["facts"]["adapter"].get("double"))

    def read_merged(targets: Mapping[str, Tensor]) -> None:
        changed = {f"{layer}.weight": tensors for layer, tensors in adapter.items() if f"{layer}.weight" in targets}
        others = narrow.keys() & targets.keys()
        exact = _empty(whole, {source: source for source in changed.keys() | others}) if dtype else {}
        wanted = {**targets, **exact}
        of_base = {source: tensor for source, tensor in wanted.items() if source not in newer}
        read({source: tensor for source, tensor in of_base.items() if source not in apart})
        for name in apart.keys() & of_base.keys():
            twin = of_base.get(apart[name])
            if twin is None or twin.dtype != of_base[name].dtype:
                read({apart[name]: of_base[name]})
            else:
                of_base[name].copy_(twin)
        fill(url, commit, {source: tensor for source, tensor in wanted.items() if source in newer})
        for source in others:
            wanted[source].copy_(rounded(wanted[source].to(narrow[source]), nested=nested))
            targets[source].copy_(wanted[source])
        for source, tensors in changed.items():
            targets[source].copy_(merged(wanted[source], tensors, scaling))

    made = as_saved(place, whole, names, dtype)
    return write(made, read_merged, facts, to, dtype=dtype, shard=shard, form=form, beside=beside)


def _packed(commit: Commit, layers: Mapping[str, Mapping[str, Tensor]]) -> dict[str, torch.dtype]:
    """Name of each weight of the base that the run held packed -> the type that it had there, that of the adapter."""
    kind = next(iter(next(iter(layers.values())).values())).dtype
    return {f"model.{name}": kind for name in commit["facts"]["adapter"].get("packed") or ()}


def written_apart(url: str, commit: Commit) -> dict[str, str]:
    """Name of a weight that is tied to that of a layer with an adapter -> the name under which both are saved. They are
    two weights in a merged model. Raises DamagedError.
    """
    tied = commit["facts"].get("tied") or {}
    layers = [f"{layer}.weight" for layer in _layers(url, commit, "model")]
    changed = {tied.get(weight, weight) for weight in layers}
    return {name: first for name, first in tied.items() if first in changed}


def _untied(url: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of the model when embedding and head are two weights. Raises WordsError if they always are one."""
    config = facts.get("huggingface")
    if not isinstance(config, Mapping):
        return {**facts}
    inner = config.get("text_config")
    of_text = {"text_config": {**inner, "tie_word_embeddings": False}} if isinstance(inner, Mapping) else {}
    config = {**config, **of_text, "tie_word_embeddings": False}
    if not can_untie(config):
        raise WordsError(
            f"adapter=merged: {url} adapts a weight that is tied to another one, and a {config['model_type']} of "
            "transformers always ties them. Type adapter=peft, or train without that layer in adapter.targets."
        )
    return {**facts, "huggingface": config}


def _whole(
    url: str, commit: Commit, named: Mapping[str, Any] | None
) -> tuple[str, Commit, Callable[[Mapping[str, Tensor]], None]]:
    """(URL, tensors, how to fill them) of the base of an adapter, or of the checkpoint that holds both."""
    if named and others.is_reference(named):
        foreign = others.Whole(named, commit["facts"])
        return named["url"], foreign.commit, foreign.fill
    place, whole = base.find(named) if named else (url, commit)
    check_sizes(place, whole)
    return place, whole, partial(fill, place, whole)


def _layers(url: str, commit: Commit, weights: str) -> dict[str, dict[str, str]]:
    """Layer -> {name of a parameter that the adapter added -> its name in the checkpoint}. Raises WordsError if the
    averages are asked for and there are none, DamagedError if a layer has no two matrices.
    """
    if weights == "ema" and not any(name.startswith("ema.") for name in commit["tensors"]):
        raise WordsError(f"weights=ema: {url} has no average of the weights. Type weights=model.")
    layers = dict[str, dict[str, str]]()
    for name in commit["tensors"]:
        kind, _, path = name.partition(".")
        layer, _, own = path.rpartition(".")
        if kind == weights and own in PEFT_NAMES:
            layers.setdefault(layer, {})[own] = name
    wanted = {*PEFT_NAMES} if commit["facts"]["adapter"]["kind"] == "dora" else {"lora_A", "lora_B"}
    if not layers or any(sources.keys() != wanted for sources in layers.values()):
        raise DamagedError.during("read the commit of", url, "it does not hold an adapter of the kind that it states")
    return layers


def _tensors(url: str, commit: Commit, weights: str) -> dict[str, dict[str, Tensor]]:
    """Layer -> its tensors of the adapter, in memory."""
    layers = _layers(url, commit, weights)
    read = _empty(commit, {source: source for sources in layers.values() for source in sources.values()})
    fill(url, commit, read)
    return {layer: {name: read[source] for name, source in sources.items()} for layer, sources in layers.items()}


def _empty(commit: Commit, sources: Mapping[str, str]) -> dict[str, Tensor]:
    """Name -> an empty tensor for what the checkpoint has under another one."""
    facts = {name: commit["tensors"][source] for name, source in sources.items()}
    return {name: torch.empty(each["shape"], dtype=KINDS[each["dtype"]]) for name, each in facts.items()}


def _peft_config(commit: Commit, layers: list[str]) -> dict[str, Any]:
    """adapter_config.json; the names of the layers are whole, so that peft finds these and no others."""
    facts, config = commit["facts"]["adapter"], commit["facts"].get("huggingface") or {}
    kind = str(next(iter(config.get("architectures") or ()), ""))
    return {
        "peft_type": "LORA",
        "task_type": next((task for end, task in TASKS.items() if kind.endswith(end)), None),
        "base_model_name_or_path": (commit["facts"].get("base") or {}).get("url"),
        "target_modules": layers,
        "r": facts["rank"],
        "lora_alpha": facts["alpha"],
        "lora_dropout": facts["dropout"],
        "use_dora": facts["kind"] == "dora",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
