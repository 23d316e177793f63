"""The model that weights are of, as the files beside them say: plan.yaml and COMMIT.json of a run, config.json of a
folder of Hugging Face.

    owner_of("runs/large").part         {'_target_': 'dtrain.model.gpt.GPT', 'vocab': 256, ...}
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from dtrain.config.facts import about
from dtrain.errors import DtrainError, StoreError
from dtrain.planned import Part
from dtrain.secrets import screen
from dtrain.storage import attempts, hub, store
from dtrain.weights import ForeignError
from dtrain.weights.place import is_ours, near, open_at

LARGEST = 1 << 28
"""Largest file that is read, in bytes."""
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "n_embd", "n_layer", "d_model", "d_ff",
)  # fmt: skip
"""Entries of a config.json that are sizes of weights."""
MERGE = "Export it first: dtrain checkpoint export {0} adapter=merged to=<a folder>, and name that"


@dataclass(frozen=True)
class Owner:
    """`url`: of the weights; `part`: the model. `vocab`: how many tokens it knows, None if the files do not say;
    `tokenizer`: the URL of its tokenizer.json, `bytes`, or None.
    """

    url: str
    part: Part
    vocab: int | None = None
    tokenizer: str | None = None


def owner_of(name: str) -> Owner:
    """The model at `name`: a run or checkpoint of dtrain, or a folder, hub repository or URL. Raises StoreError if its
    weights are not there, or nothing says what model they are of.
    """
    url = hub.place(name)
    try:
        if is_ours(url):
            return _of_run(url)
        config = open_at(url).config
    except StoreError as error:
        if url == name or not (hint := near(name)):
            raise
        cause = f"no folder is there, and {str(error).split('. ')[0].rstrip('.')}"
        raise ForeignError.during("find a model at", name, cause, hint) from error
    if config is None:
        cause = "no config.json beside the weights says what model they are of"
        raise ForeignError.during("find a model at", url, cause, "Type a run of dtrain, or a folder with config.json")
    part = {"_target_": "dtrain.model.hf.load", "name": name, "task": "causal_lm", "weights": "pretrained"}
    tokenizer = store.join(url, "tokenizer.json")
    return Owner(url, {**part, "config": {}}, vocab_in(config), tokenizer if store.exists(tokenizer) else None)


def _of_run(url: str) -> Owner:
    """The model of a run, with the vocabulary that its newest checkpoint has."""
    newest = next((one for one in attempts.listed_at(url) if one.is_committed), None)
    if newest is None:
        raise StoreError.during("find a checkpoint at", url, "there is none that is committed")
    root = newest.url.split("/checkpoints/")[0]
    plan = _mapping(store.join(root, "plan.yaml"))
    facts = _mapping(store.join(newest.url, attempts.COMMIT)).get("facts")
    facts = facts if isinstance(facts, Mapping) else {}
    if isinstance(adapter := facts.get("adapter"), Mapping):
        cause = f"it holds an adapter ({adapter.get('kind')}), not a model"
        raise StoreError.during("take the model of", url, cause, MERGE.format(screen.typed(f"out={root}")))
    part, data = plan.get("model"), plan.get("data")
    if not isinstance(part, Mapping) or not isinstance(part.get("_target_"), str):
        raise StoreError.during("read", store.join(root, "plan.yaml"), "it names no model")
    vocab = vocab_in(facts.get("huggingface") or facts.get("as_transformers"))
    if part.get("vocab") == "auto" and vocab:
        part = {**part, "vocab": vocab}
    tokenizer = data.get("tokenizer") if isinstance(data, Mapping) else None
    return Owner(url, dict(part), vocab, tokenizer if isinstance(tokenizer, str) else None)


def vocab_in(config: Any) -> int | None:
    """How many tokens a model with this config.json knows; None if it does not say."""
    if not isinstance(config, Mapping):
        return None
    size = config.get("vocab_size")
    return size if isinstance(size, int) else vocab_in(config.get("text_config"))


def configuration(name: str) -> Mapping[str, Any]:
    """config.json of a model of transformers; empty if it cannot be read."""
    place = hub.place(name)
    try:
        if place.startswith(hub.SCHEME):
            read = json.loads(hub.read(place, "config.json"))
        else:
            read = json.loads(store.small(store.join(place, "config.json"), LARGEST))
    except (DtrainError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, Mapping) else {}


def key_of(part: Part, url: str) -> str:
    """The key by which a model names `url` as the place of its pretrained weights; empty if it does not."""
    name = about(part).get("weights_at")
    is_own = name and part.get("weights") == "pretrained" and hub.place(str(part.get(name))) == url
    return f"model.{name}" if is_own else ""


def resized(part: Part, url: str, config: Mapping[str, Any], *, adapter: Part) -> list[str]:
    """A sentence for each size of `model.config` that is not the one of the pretrained weights, by the `config` beside
    them.
    """
    if not key_of(part, url):
        return []
    asked: Mapping[str, Any] = part.get("config") or {}
    instead = "" if about(adapter).get("trains") == "adapter" else ", or type model.weights=random"
    return [
        f"model.config={{{key}: {asked[key]}}}: the pretrained weights at {url} have {key}: {config[key]}. Leave {key} "
        f"out{instead}."
        for key in SIZES
        if isinstance(asked.get(key), int) and isinstance(config.get(key), int) and asked[key] != config[key]
    ]


def other_weights(part: Part, url: str, *, adapter: Part) -> str:
    """The words to type where the pretrained weights of a model are not at `url`; empty if it does not name them
    there.
    """
    own = key_of(part, url)
    if not own:
        return ""
    name = str(part[own.removeprefix("model.")])
    places = f"{own}=<a folder with weights, or <organisation>/<name> of the Hugging Face hub>"
    if about(adapter).get("trains") == "adapter":
        return f" Type {places}, or init=<a run or weights>: an adapter is trained on them.{hub.longer(name)}"
    return f" Type {places}, or model.weights=random to begin with random weights.{hub.longer(name)}"


def no_base(part: Part) -> str:
    """The sentence for an adapter without weights to train on."""
    name = about(part).get("weights_at")
    if not name:
        return "adapter: it is trained on weights. Type init=<the URL of a run or checkpoint>, or adapter=none."
    return (
        f"model.weights={part.get('weights')}: an adapter is trained on weights that exist. Leave model.weights out "
        f"and type model.{name}=<a folder with weights>, or type init=<a run or weights>, or adapter=none."
    )


def tokens(tokenizer: str) -> dict[int, str]:
    """Number -> text of the tokens of a tokenizer.json, or of the folder, URL or hub name with one; empty for anything
    else.
    """
    try:
        place = tokenizer if tokenizer.endswith(".json") else hub.place(tokenizer)
        if place.startswith(hub.SCHEME):
            text = hub.read(place, "tokenizer.json")
        else:
            text = store.small(place if place.endswith(".json") else store.join(place, "tokenizer.json"), LARGEST)
        read = json.loads(text)
        listed, added = read["model"]["vocab"], read.get("added_tokens") or []
        pairs = listed.items() if isinstance(listed, Mapping) else ((one[0], index) for index, one in enumerate(listed))
        found = {int(number): str(text) for text, number in pairs}
        return found | {int(one["id"]): str(one["content"]) for one in added}
    except (DtrainError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return {}


def _mapping(url: str) -> Mapping[str, Any]:
    """A file of a run, JSON or YAML. Raises StoreError."""
    text = store.small(url, LARGEST)
    try:
        read = json.loads(text) if url.endswith(".json") else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StoreError.during("read", url, "it is damaged") from error
    if not isinstance(read, Mapping):
        raise StoreError.during("read", url, "it is damaged")
    return read
