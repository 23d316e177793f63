"""Exports a checkpoint as files that other libraries read: Hugging Face's `model.safetensors`, or shards of it with
their index, with `config.json` if the model is one of theirs.

Each file is assembled on the local disk, with one file of the checkpoint in memory at a time, and uploaded when it is
complete; the index comes last.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtrain.checkpoint import shards
from dtrain.checkpoint.commit import DamagedError
from dtrain.checkpoint.destination import Destination, destination
from dtrain.checkpoint.format import NAMES, Entry, header
from dtrain.checkpoint.leaving import Made, leave
from dtrain.checkpoint.load import parse_file, read_file, tensor_of
from dtrain.errors import StoreError, WordsError
from dtrain.storage import leftovers, store

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = {str(dtype): dtype for dtype in NAMES}


def export(
    url: str,
    commit: Mapping[str, Any],
    to: str,
    *,
    weights: str,
    dtype: str | None,
    shard: float = math.inf,
    form: str | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> list[str]:
    """Write the checkpoint at `url` to the folder `to`, and return the URLs of the files. `weights`: model or ema;
    `dtype`: of DTYPES, None: as saved; `shard`: bytes of the tensors in a file, unless one is larger; `form`:
    transformers for a gpt or moe as one of its models; `beside`: files for a folder with config.json.

    A tensor that several modules share is written once, under its first name, as transformers does. Raises WordsError
    if the checkpoint has no average or cannot have this form, StoreError if a file exists already or the storage fails,
    DamagedError if bytes differ from those that were saved.
    """
    check_sizes(url, commit)
    made, read = as_saved(url, commit, chosen(url, commit, weights), dtype), partial(fill, url, commit)
    return write(made, read, commit["facts"], to, dtype=dtype, shard=shard, form=form, beside=beside)


def write(
    made: Mapping[str, Made],
    read: Callable[[Mapping[str, Tensor]], None],
    facts: Mapping[str, Any],
    to: str,
    *,
    dtype: str | None,
    shard: float,
    form: str | None,
    beside: Mapping[str, bytes] | None,
) -> list[str]:
    """Write these tensors, of a checkpoint with these `facts`. `read` fills tensors by their names in it. A reader
    takes the folder for whole by the last file: config.json, or the index.
    """
    config = facts.get("huggingface")
    if form:
        config = facts.get("as_transformers")
        if not isinstance(config, Mapping):
            raise WordsError(f"as={form}: the checkpoint is of no gpt or moe of dtrain. Leave as out.")
        made = leave(made, config)
    sizes = {name: math.prod(one.shape) * one.dtype.itemsize for name, one in made.items()}
    files, place = _files(sizes, shard), destination(to)
    small = {**(beside or {} if config else {}), **_index(files, sizes), **config_file(config, dtype)}
    place.refuse_existing(WEIGHTS, CONFIG, INDEX, *files, *small)
    written = list[str]()
    for file, names in files.items():
        kinds, shapes = {name: made[name].dtype for name in names}, {name: made[name].shape for name in names}
        with assembled(place, file, kinds, shapes) as targets:
            _make({name: made[name] for name in names}, targets, read)
        written.append(store.join(to, file))
    written += [place.small(name, data) for name, data in small.items()]
    place.finish()
    return written


def _make(
    made: Mapping[str, Made], targets: Mapping[str, Tensor], read: Callable[[Mapping[str, Tensor]], None]
) -> None:
    """Fill the tensors of one file."""
    waiting = [(source, targets[name][box]) for name, one in made.items() for source, box in one.parts.items()]
    while waiting:  # a source that fills two of them is read twice
        now = dict(reversed(waiting))
        read(now)
        waiting = [(source, target) for source, target in waiting if now[source] is not target]
    for name, one in made.items():
        if not one.parts:
            targets[name].fill_(one.value)
        elif one.scale != 1:
            targets[name].mul_(one.scale)


def as_saved(url: str, commit: Mapping[str, Any], names: Mapping[str, str], dtype: str | None) -> dict[str, Made]:
    """The tensors of an export as the checkpoint has them; `names`: name there -> name in the checkpoint."""
    return {
        name: Made(
            tuple(commit["tensors"][source]["shape"]),
            _kind(url, commit["tensors"][source]["dtype"], dtype),
            {source: ()},
        )
        for name, source in names.items()
    }


@contextmanager
def assembled(
    place: Destination, name: str, kinds: Mapping[str, torch.dtype], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[str, Tensor]]:
    """A context of tensors to fill; at its end they are the safetensors file `name` at `place`."""
    with leftovers.scratch("export") as folder:
        try:
            with _laid_out(folder / name, kinds, shapes) as targets:
                yield targets
            place.file(folder / name)
        except OSError as error:
            raise StoreError.during(
                "write", str(folder), error.strerror or error, "Set TMPDIR to a place with more room"
            ) from error


def _files(sizes: Mapping[str, int], shard: float) -> dict[str, list[str]]:
    """The names of the tensors in each file, in the order of the model."""
    groups, room = list[list[str]](), -1.0
    for name, size in sizes.items():
        if size > room or not groups:
            groups.append([])
            room = shard
        groups[-1].append(name)
        room -= size
    if len(groups) < 2:
        return {WEIGHTS: list(sizes)}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": names for number, names in enumerate(groups, 1)}


def _index(files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> dict[str, bytes]:
    """The index of several files, by which readers find the file of a tensor."""
    places = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
    return {INDEX: json.dumps(index, indent=2).encode()} if len(files) > 1 else {}


def chosen(url: str, commit: Mapping[str, Any], weights: str) -> dict[str, str]:
    """Name in the file -> name in the checkpoint: buffers and frozen parameters have no average."""
    names = {name.removeprefix("model."): name for name in commit["tensors"] if name.startswith("model.")}
    if weights == "ema":
        averages = {name.removeprefix("ema."): name for name in commit["tensors"] if name.startswith("ema.")}
        if not averages:
            raise WordsError(f"weights=ema: {url} has no average of the weights. Type weights=model.")
        names |= averages
    return names


def check_sizes(url: str, commit: Mapping[str, Any]) -> None:
    """Raises DamagedError if the pieces of a file exceed its size, because a false shape would fill the disk."""
    sizes = dict.fromkeys((file["name"] for file in commit["files"]), 0)
    for piece in commit["pieces"]:
        kind = _kind(url, commit["tensors"][piece["name"]]["dtype"], None)
        sizes[piece["file"]] += math.prod(piece["shape"]) * kind.itemsize
    for file in commit["files"]:
        if sizes[file["name"]] > file["size"]:
            raise DamagedError.during("load", store.join(url, file["name"]), "it is to hold more than it has bytes")


def _kind(url: str, saved: str, asked: str | None) -> torch.dtype:
    if saved not in KINDS:
        raise DamagedError.during("read the commit of", url, f"{saved[:40]!r} is not a dtype")
    return DTYPES[asked] if asked and KINDS[saved].is_floating_point else KINDS[saved]


@contextmanager
def _laid_out(
    path: Path, kinds: Mapping[str, torch.dtype], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[dict[str, Tensor]]:
    """Tensors mapped to the file `path`; filling them completes the file."""
    entries, begin = dict[str, Entry](), 0
    for name in sorted(kinds, key=lambda name: (-kinds[name].itemsize, name)):  # each aligned to its size
        entries[name] = Entry(kinds[name], shapes[name], begin)
        begin = entries[name].end
    head = header(entries, {"format": "pt"})
    start = len(head)
    with path.open("w+b") as file:
        # else a full disk would kill the process when the mapping is written to
        os.posix_fallocate(file.fileno(), 0, start + begin)
        file.write(head)
        file.flush()
        memory = mmap.mmap(file.fileno(), start + begin)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        yield {
            name: whole[start + one.begin : start + one.end].view(one.dtype).view(one.shape)
            for name, one in entries.items()
        }
        memory.flush()


def fill(url: str, commit: Mapping[str, Any], targets: Mapping[str, Tensor]) -> None:
    """Copy every piece into its target, one file after another."""
    pieces = shards.grouped((piece for piece in commit["pieces"] if piece["name"] in targets), "file")
    for file in commit["files"]:
        if file["name"] not in pieces:
            continue
        where = store.join(url, file["name"])
        data = read_file(where, file)
        entries = parse_file(where, data, commit, pieces[file["name"]])
        for piece in pieces[file["name"]]:
            sides = zip(piece["offset"], piece["shape"], strict=True)
            place = tuple(slice(begin, begin + size) for begin, size in sides)
            targets[piece["name"]][place].copy_(tensor_of(data, entries[piece["key"]]))


def config_file(config: Any, dtype: str | None) -> dict[str, bytes]:
    """config.json, if there is one, without the names of code to run."""
    if not isinstance(config, Mapping):
        return {}
    data = {key: value for key, value in config.items() if key != "auto_map"}
    if dtype:
        data["dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
    return {CONFIG: json.dumps(data, indent=2, sort_keys=True).encode()}
