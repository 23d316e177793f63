"""The files beside the weights of an export, which make it complete for transformers: those of the tokenizer, and what
was beside the model's own weights, such as generation_config.json.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from dtrain.errors import DtrainError, StoreError
from dtrain.storage import attempts, hub, store

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
OF_MODEL = ("generation_config.json", "preprocessor_config.json", "processor_config.json")
LARGEST = 1 << 28
"""Largest file, in bytes."""
HF = "dtrain.model.hf.load"


def of_run(source: str) -> tuple[dict[str, bytes], list[str]]:
    """(name -> bytes of the files, why there are none) for the run, or the imported weights, that hold a checkpoint."""
    root = source.split("/checkpoints/")[0]
    plan, note = _read(root, "plan.yaml"), _read(root, attempts.IMPORTED)
    model, faults = plan.get("model") or {}, list[str]()
    place = hub.place(str(model["name"])) if model.get("_target_") == HF else str(note.get("source") or "")
    files = _beside(place, (*OF_MODEL, *TOKENIZER), faults) if place else {}
    tokenizer = next(_tokenizers(plan.get("data")), None)
    if tokenizer is not None:
        files = {name: data for name, data in files.items() if name in OF_MODEL}
        files |= _bytes() if tokenizer == "bytes" else _given(tokenizer, faults)
    if "tokenizer.json" in files:
        files.setdefault("tokenizer_config.json", _config())
    return files, faults


def _given(tokenizer: str, faults: list[str]) -> dict[str, bytes]:
    """The files of a tokenizer that is a folder, or a file with others beside it."""
    folder, _, name = tokenizer.rpartition("/")
    if not name.endswith(".json"):
        return _beside(tokenizer, TOKENIZER, faults)
    files = _beside(folder or ".", TOKENIZER if name == "tokenizer.json" else (name,), faults)
    return {"tokenizer.json" if each == name else each: data for each, data in files.items()}


def _beside(place: str, names: tuple[str, ...], faults: list[str]) -> dict[str, bytes]:
    """Those of these files that are in a folder; why there are none goes to `faults`."""
    try:
        if place.startswith(hub.SCHEME):
            return hub.files(place, names)
        there = store.sizes(place)
        files = {name: store.read(store.join(place, name)) for name in names if 0 <= there.get(name, -1) <= LARGEST}
    except DtrainError as error:
        faults.append(str(error))
        return {}
    if not files and not store.children(place):
        faults.append(f"{place} is not there any more")
    return files


def _bytes() -> dict[str, bytes]:
    """A tokenizer.json whose tokens are bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    marks = {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {marks[byte]: byte for byte in range(256)}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
    return {"tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode()}


def _config() -> bytes:
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}).encode()


def _tokenizers(data: Any) -> Iterator[str]:
    """The tokenizers that a source of data names, also inside of a mixture."""
    if isinstance(data, Mapping):
        if isinstance(data.get("tokenizer"), str):
            yield data["tokenizer"]
        for below in data.values():
            yield from _tokenizers(below)


def _read(root: str, name: str) -> Mapping[str, Any]:
    """A YAML file of a run; empty if it is not there."""
    try:
        read = yaml.safe_load(store.small(store.join(root, name), LARGEST))
    except (StoreError, yaml.YAMLError, RecursionError):
        return {}
    return read if isinstance(read, Mapping) else {}
