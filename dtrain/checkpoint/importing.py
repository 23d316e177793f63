"""Writes weights of others as a checkpoint of dtrain, one file in memory at a time: of step 0, without optimizer.

A folder with imported.yaml is not a run: `init=` and `checkpoint export` read it, and no run can go on there.
"""

import datetime
import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import yaml
from torch import Tensor

from dtrain.checkpoint import commit as commits
from dtrain.checkpoint.adopt import read
from dtrain.checkpoint.format import Entry, header
from dtrain.checkpoint.shards import ShardOverlap
from dtrain.checkpoint.snapshot import Piece, pack
from dtrain.errors import StoreError
from dtrain.storage import attempts, store
from dtrain.weights import ForeignError, Stored, Weights, names, place


def import_weights(source: str, to: str, table: Any = None) -> tuple[str, Weights, dict[str, str]]:
    """Write the weights at `source` as a checkpoint under `to`. `table`: of `init_names`. Returns its URL, what was
    read, and our name -> theirs. Raises ForeignError, StoreError.
    """
    rules, weights = names.table(table), place.open_at(source)
    there = [name for name in store.children(to) if name not in ("checkpoints", attempts.IMPORTED)]
    if there or any(one.is_committed for one in attempts.listed(to)):
        there = there or store.children(to)
        raise StoreError.during("write", to, f"it holds {', '.join(there[:3])} already", "Type to=<another place>")
    ours, faults = names.renamed(weights.tensors, rules)
    if faults or not ours:
        raise ForeignError.during("import", source, "; ".join(faults) or "no tensor is left")
    ours, tied = _once(weights, names.unwrapped(ours))
    name = f"{1:08d}-{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:8]}-0001"
    url = store.join(attempts.folder(to, 0), name)
    tensors = {f"model.{name}": weights.tensors[theirs] for name, theirs in ours.items()}
    files, pieces = list[dict[str, Any]](), list[dict[str, Any]]()
    for file, group in enumerate(pack(_empty(tensors))):
        files.append(
            _write(
                url,
                file=f"import-{file:05d}.safetensors",
                group=group,
                tensors=tensors,
                source=weights.url,
                attempt=name,
            )
        )
        pieces += [_row(piece, files[-1]["name"]) for piece in group]
    store.sync_folder(url)
    facts = {"step": 0, "optim": {}, "huggingface": weights.config, "tied": tied}
    shapes = {name: {"shape": list(one.shape), "dtype": f"torch.{one.dtype}"} for name, one in tensors.items()}
    commit = {"step": 0, "attempt": name, "facts": facts, "files": files, "tensors": shapes, "pieces": pieces}
    if fault := commits.fault(commit):
        raise ForeignError.during("import", source, fault)
    store.write(store.join(to, attempts.IMPORTED), _note(weights, table))
    commits.write(url, commit)
    return url, weights, ours


def _once(weights: Weights, ours: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """(our name -> theirs, further name -> first): tensors that share all of their bytes are written once."""
    first, kept, tied = dict[Any, str](), dict[str, str](), dict[str, str]()
    for name, theirs in ours.items():
        stored = weights.tensors[theirs]
        owner = first.setdefault((stored, name if 0 in stored.shape else ""), name)
        if owner == name:
            kept[name] = theirs
        else:
            tied[name] = owner
    return kept, tied


def _empty(tensors: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor, Sequence[int]]]:
    """Each tensor without memory, and its offset."""
    for name, stored in tensors.items():
        empty = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")
        if empty.numel():
            yield name, empty, (0,) * empty.ndim


def _write(
    url: str, file: str, group: Sequence[Piece], tensors: Mapping[str, Stored], source: str, attempt: str
) -> dict[str, Any]:
    """Write one file, and return its facts."""
    entries, begin = dict[str, Entry](), 0
    for piece in group:
        entries[piece.key] = Entry(piece.dtype, piece.shape, begin)
        begin = entries[piece.key].end
    parts = [header(entries, {"step": "0", "attempt": attempt})]
    parts += [_bytes(part(source, tensors[piece.name], piece.offset, piece.shape)) for piece in group]
    digest = hashlib.sha256()
    for each in parts:
        digest.update(each)
    store.put(store.join(url, file), parts)
    return {"name": file, "size": sum(map(len, parts)), "sha256": digest.hexdigest()}


def part(source: str, stored: Stored, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A box of a tensor. Raises ForeignError if the pieces there leave a hole, StoreError."""
    target = torch.empty(tuple(shape), dtype=getattr(torch, stored.dtype))
    shifted = [
        {"offset": [a - b for a, b in zip(one.offset, offset, strict=True)], "shape": one.shape, "piece": one}
        for one in stored.pieces
    ]
    overlap, filled = ShardOverlap(target, shifted), 0
    for number, (piece, theirs, ours) in enumerate(overlap.overlaps):
        value = read(piece["piece"], stored.dtype, theirs)
        overlap.overlaps[number] = piece, tuple(slice(0, size) for size in value.shape), ours
        overlap.fill(number, value)
        filled += value.numel()
    if filled != target.numel():
        raise ForeignError.during("read", source, "the pieces of a tensor do not cover it exactly once")
    return target


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _row(piece: Piece, file: str) -> dict[str, Any]:
    return {"name": piece.name, "key": piece.key, "file": file, **piece.place}


def _note(weights: Weights, table: Any) -> bytes:
    """imported.yaml: where the weights come from."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = {"source": weights.url, "kind": weights.kind, "names": table, "at": now}
    return yaml.safe_dump(facts, sort_keys=False).encode()
