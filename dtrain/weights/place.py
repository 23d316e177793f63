"""Opens the checkpoint at a URL, whose kind is told by the names of its files.

Folders that only their own tools can put together are refused with the command of that tool.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from dtrain.secrets import screen
from dtrain.storage import store
from dtrain.storage.attempts import ATTEMPT, COMMIT, STEP, best_at
from dtrain.weights import ForeignError, Stored, Weights, dcp, names, plain, safetensors, torchfile

SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE = ("model.safetensors", "pytorch_model.bin")
TORCH = (".pt", ".pth", ".ckpt", ".bin")
INDEX_BYTES = 64 << 20
OTHERS = {
    ".gguf": "transformers reads it: AutoModel.from_pretrained(<folder>, gguf_file=<file>).save_pretrained(<place>)",
    ".msgpack": "transformers reads it: AutoModel.from_pretrained(<folder>, from_flax=True).save_pretrained(<place>)",
    ".h5": "Load it with Keras, and save the weights with safetensors",
    ".onnx": "Export the weights where they came from: ONNX holds a program",
    ".nemo": "Unpack it with tar xf, and name the checkpoint in it",
}
"""Ends of files that hold weights in other ways -> what to do."""
DEEPSPEED = (
    "it holds shards of DeepSpeed",
    "Type python {0}/zero_to_fp32.py {0} <place> --safe_serialization (the script is in the folder), then init=<place>",
)
MEGATRON = (
    "it holds shards of Megatron",
    "Type python -c \"from megatron.bridge import AutoBridge; AutoBridge.from_hf_pretrained('<model>').export_ckpt("
    "'{0}', '<place>')\", then init=<place>",
)
DIFFUSERS = "it is a pipeline of diffusers, of several models", "Name one of them, such as {0}/unet"
PEFT = (
    "it is an adapter of peft, without the weights of its base",
    "Type python -c \"from peft import AutoPeftModel; AutoPeftModel.from_pretrained('{0}').merge_and_unload()"
    ".save_pretrained('<place>')\", then init=<place>",
)


def is_ours(url: str) -> bool:
    """Whether a run, a step, an attempt or the best checkpoint of dtrain lies there, or may lie there. Raises
    StoreError.
    """
    above, name = ("", *url.rstrip("/").split("/"))[-2:]
    if STEP.fullmatch(name) or (STEP.fullmatch(above) and ATTEMPT.fullmatch(name)):
        return True
    below = store.children(url)
    if not below and best_at(url):
        return True
    return COMMIT in below or "checkpoints" in below or any(map(STEP.fullmatch, below))


def open_at(url: str) -> Weights:
    """The checkpoint of others at a URL: a folder of Hugging Face or of torch's DCP, or one file. Reads headers alone.
    Raises ForeignError for anything else, StoreError.
    """
    files = store.sizes(url)
    below = set(files) | set(store.children(url))
    if below:
        return _folder(url.rstrip("/"), below)
    if store.size(url) < 0:
        raise ForeignError.during("find a checkpoint at", url, "nothing is there", near(url))
    return _file(url)


def _folder(url: str, below: set[str]) -> Weights:
    config = _config(url) if "config.json" in below else None
    for index in SHARDED:
        if index in below:
            return Weights(url, "a sharded folder of Hugging Face", _sharded(url, index), config)
    single = [name for name in SINGLE if name in below]
    if single:
        return Weights(url, "a folder of Hugging Face", _one(store.join(url, single[0])), config)
    if refused := _refused(below):
        raise ForeignError.during("read", url, refused[0], refused[1].format(url))
    if dcp.METADATA in below:
        return Weights(url, "a checkpoint of torch DCP", names.weights_in(url, dcp.tensors(url)))
    files = sorted(name for name in below if name.endswith((".safetensors", *TORCH)))
    if len(files) == 1 and files[0].endswith(".safetensors"):
        return Weights(url, "a folder with one safetensors file", _one(store.join(url, files[0])), config)
    hint = (
        f"Type {screen.typed(f'init={store.join(url, files[0])}')} for one of its files" if files else _of_others(below)
    )
    raise ForeignError.during("find a checkpoint in", url, f"it holds {', '.join(map(plain, sorted(below)[:5]))}", hint)


def _refused(below: set[str]) -> tuple[str, str] | None:
    """The cause and the hint for a folder that only its own tool can put together."""
    parts = any("mp_rank_" in name and name.endswith("_states.pt") for name in below)
    if "zero_to_fp32.py" in below or parts or any(name.startswith("global_step") for name in below):
        return DEEPSPEED
    ranks = any(name.startswith(("mp_rank_", "iter_0")) and "." not in name for name in below)
    if "latest_checkpointed_iteration.txt" in below or "common.pt" in below or ranks:
        return MEGATRON
    if "model_index.json" in below:
        return DIFFUSERS
    return PEFT if "adapter_config.json" in below else None


def _file(url: str) -> Weights:
    name = url.rstrip("/").rsplit("/", 1)[-1]
    if name in SHARDED:
        return Weights(url, "a sharded folder of Hugging Face", _sharded(url.rsplit("/", 1)[0], name))
    if name.endswith(".safetensors"):
        return Weights(url, "a safetensors file", safetensors.tensors(url))
    if hint := _of_others({name}):
        raise ForeignError.during("read", url, "it is neither safetensors nor a file of torch", hint)
    return Weights(url, "a file of torch.save", _one(url))


def _one(url: str) -> dict[str, Stored]:
    """The tensors of one file."""
    if url.endswith(".safetensors"):
        return safetensors.tensors(url)
    return names.weights_in(url, torchfile.tensors(url))


def _sharded(url: str, index: str) -> dict[str, Stored]:
    """The tensors of all files that an index lists. Raises ForeignError unless they are as it says."""
    where = store.join(url, index)
    try:
        places = safetensors.mapping(safetensors.mapping(_json(where)).get("weight_map"))
    except ValueError as error:
        raise ForeignError.during("read", where, str(error)) from error
    if odd := next((name for name in places.values() if not isinstance(name, str) or {"/", "\\"} & {*name}), None):
        raise ForeignError.during("read", where, f"{plain(odd)} is not a file beside it")
    there = store.sizes(url)
    if lost := sorted({*places.values()} - set(there)):
        cause = f"it lists {len(lost)} files that are not there: {', '.join(lost[:3])}"
        raise ForeignError.during("read", where, cause, "Fetch the folder again")
    files = {name: _one(store.join(url, name)) for name in sorted({*places.values()})}
    if lost := [name for name, file in places.items() if name not in files[file]]:
        cause = "; ".join(names.listed("tensors that are not in the file it names", lost))
        raise ForeignError.during("read", where, cause)
    return {name: files[file][name] for name, file in places.items()}


def _config(url: str) -> Mapping[str, Any] | None:
    """config.json beside the weights; None if it is damaged, because weights alone do not need it."""
    try:
        return safetensors.mapping(_json(store.join(url, "config.json")))
    except (ForeignError, ValueError):
        return None


def _json(url: str) -> Any:
    data = store.beginning(url, INDEX_BYTES)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ForeignError.during("read", url, f"it is not JSON ({str(error)[:80]})") from error


def _of_others(below: set[str]) -> str:
    return next((hint for end, hint in OTHERS.items() if any(name.endswith(end) for name in below)), "")


def near(url: str) -> str:
    """The file or folder beside a missing one that has the most similar name."""
    folder, _, name = url.rstrip("/").rpartition("/")
    there = {one.lower(): one for one in store.children(folder or ("/" if url.startswith("/") else "."))}
    found = [there[one] for one in get_close_matches(name.lower(), there, n=1, cutoff=0.5)]
    return f"Did you mean {store.join(folder, found[0]) if '/' in url else found[0]}?" if found else ""
