"""Fills a model with the weights that others trained: each rank reads the bytes of its own shards, wherever the tensors
lie, or the ranks read them together (`exchange`). No tensor changes before all ranks agree that everything is there.
"""

import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtrain.checkpoint import exchange
from dtrain.checkpoint.conversions import converted, whole_of
from dtrain.checkpoint.format import Entry
from dtrain.checkpoint.load import tensor_of
from dtrain.checkpoint.shards import ShardOverlap
from dtrain.checkpoint.state import TrainState
from dtrain.checkpoint.sums import Sums
from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local, offset
from dtrain.model import head
from dtrain.model.adapted import packed
from dtrain.storage import store
from dtrain.storage.disk import a_file
from dtrain.storage.patience import on_disk
from dtrain.weights import ForeignError, Piece, Stored, Weights, contiguous, names, place, plain, torchfile

HEAD, EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "wte.weight")
LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of classes of transformers whose weights have a head."""
STREAMS = 2
"""Pieces that a rank reads at a time; each may be in memory beside the model."""
BUFFER = 4 << 20
"""Bytes that are read at a time to be converted: they stay in the cache of a core."""


def adopt(source: str, state: TrainState, mesh: Mesh, table: Any = None) -> dict[str, Any]:
    """Load the weights at `source` into the model of `state`; all ranks call it. `table`: of `init_names`. Returns the
    facts of the load. Raises ForeignError, StoreError.
    """
    take(source, state.weights(), state, mesh, table)
    if state.ema:
        state.ema.begin()
    return {"step": 0, "url": source, "facts": {"step": 0, "optim": {}}}


def take(
    source: str, tensors: Mapping[str, Tensor], state: TrainState, mesh: Mesh, table: Any, sums: Sums | None = None
) -> dict[str, Stored]:
    """Load the weights at `source` into these `tensors` of `state`, named as in a checkpoint; `sums` gets those of
    the parts that this rank reads. Returns what the model's tensors, on any rank, are there, by their names here.
    """
    weights, rules = _opened(source, mesh, table)
    wanted, tied = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, state.tied()
    for name in head.new(state.model, wanted):
        del wanted[name]
    everywhere, everywhere_tied = set(wanted), dict(tied)
    if mesh.shape.pp > 1:
        for others, theirs in mesh.gather((list(wanted), tied)):
            everywhere |= set(others)
            everywhere_tied |= theirs
    matching = partial(
        find,
        weights,
        tied=everywhere_tied,
        rules=rules,
        whole=partial(whole_of, state.model),
        base=head.new_base(state.model),
    )
    weights, matched = matching(wanted=everywhere)
    if matched.faults and (pooler := head.pooler(state.model, everywhere)):
        without, again = matching(wanted=everywhere - pooler)
        if not again.faults:
            weights, matched = without, again
            wanted = {name: tensor for name, tensor in wanted.items() if name not in pooler}
    faults = [*matched.faults, *unlike(weights, matched.sources, wanted)]
    check(source, mesh, faults, _hint(state.model, matched, weights, wanted))
    check(source, mesh, mesh.on_all(f"load {source}", lambda: untied(weights, matched.twins, wanted))[mesh.rank], "")
    stored = {name: weights.tensors[theirs] for name, theirs in matched.sources.items()}
    narrow = {name: layer for name, layer in packed(state.model).items() if name in wanted}
    empty = {name: wanted.pop(name) for name in narrow}
    boxes = exchange.boxes_of(mesh, wanted) if mesh.world > 1 else []
    together = exchange.shared(stored, boxes)
    mesh.on_all(f"load {source}", lambda: fill(weights, matched.sources, wanted, sums, apart=together))
    if together:
        blocks, put = exchange.blocks_of(stored, together, mesh.world), partial(_put, wanted, stored, sums)
        mesh.on_all(f"load {source}", exchange.Exchange(mesh, blocks, boxes, put).run)

    def pack() -> None:
        for name, layer in narrow.items():
            whole = torch.empty_like(empty[name], device="cpu")
            fill(weights, matched.sources, {name: whole}, sums)
            layer.pack(whole.to(mesh.device))

    if narrow:
        mesh.on_all(f"load {source}", pack)
    return stored


def _put(
    tensors: Mapping[str, Tensor], stored: Mapping[str, Stored], sums: Sums | None,
    name: str, box: tuple[slice, ...], value: Tensor,
) -> None:  # fmt: skip
    """Copy a value into this rank's part of a tensor, and note its sum."""
    tensor = tensors[name]
    inside = tuple(slice(a.start - b, a.stop - b) for a, b in zip(box, offset(tensor), strict=True))
    with torch.no_grad():
        local(tensor)[inside].copy_(value)
    if sums:
        sums.add(name, [part.start for part in box], value, stored[name].shape)


def _hint(model: nn.Module, matched: "Match", weights: Weights, wanted: Mapping[str, Tensor]) -> str:
    """The words to type if the weights are not those of the model: a new head, if that is all that differs."""
    odd = {name for name in wanted if name not in matched.sources}
    odd |= {
        name for name, theirs in matched.sources.items()
        if name in wanted and weights.tensors[theirs].shape != tuple(wanted[name].shape)
    }  # fmt: skip
    base = head.base_of(model)
    if base and odd and not any(name.startswith(base) and not head.is_pooler(name, base) for name in odd):
        return "Type model.head=new for a head that begins from the seed"
    return matched.hint


class Match(NamedTuple):
    """`sources`: name in the model -> name in the checkpoint; `faults`: names that are missing and left over, and
    `hint` what to type; `twins`: name in the model -> both names that the checkpoint has for a tied tensor.
    """

    sources: dict[str, str]
    faults: list[str]
    hint: str
    twins: dict[str, tuple[str, str]]


def find(
    weights: Weights,
    wanted: Collection[str],
    tied: Mapping[str, str],
    rules: names.Table,
    whole: Callable[[], nn.Module | None],
    base: str = "",
) -> tuple[Weights, Match]:
    """The match of a checkpoint, or of what transformers makes of it for its model `whole`, if that has other names."""
    matched = match(weights, wanted, tied, rules, base)
    if not matched.faults or rules or (model := whole()) is None:
        return weights, matched
    weights = converted(weights, model)
    return weights, match(weights, wanted, tied, rules, base)


def match(
    weights: Weights, wanted: Collection[str], tied: Mapping[str, str], rules: names.Table, base: str = ""
) -> Match:
    """Find each tensor of the model. `tied`: further name of a shared tensor -> its first; the checkpoint may have it
    under any of them. `base`: how the names begin that are not of a head which is left out.
    """
    theirs, faults = names.renamed(weights.tensors, rules)
    theirs = names.without_prefix(theirs, {*wanted, *tied})
    sources, twins = {name: theirs[name] for name in wanted if name in theirs}, dict[str, tuple[str, str]]()
    for further, first in tied.items():
        if further in theirs and first in wanted:
            one = sources.setdefault(first, theirs[further])
            if weights.tensors[one] != weights.tensors[theirs[further]]:
                twins[first] = one, theirs[further]
    sources |= _of_tied(weights, set(wanted) - set(sources), sources)
    missing, left = set(wanted) - set(sources), set(theirs) - set(wanted) - set(tied)
    left = {name for name in left if name.startswith(base)}
    faults += [*names.listed("missing", missing), *names.listed("left over", {theirs[name] for name in left})]
    hint = names.hint(missing, {theirs[name] for name in left}) if missing or left else ""
    return Match(sources, faults, hint, twins)


def _of_tied(weights: Weights, missing: Collection[str], sources: Mapping[str, str]) -> dict[str, str]:
    """The head of a model that is not tied, from the embedding of weights that are: they have one tensor for both."""
    config = weights.config or {}
    kinds = [str(name).endswith(LANGUAGE) for name in config.get("architectures") or ()]
    embeddings = [theirs for name, theirs in sources.items() if name.endswith(EMBEDDINGS)]
    if HEAD not in missing or len(embeddings) != 1 or not config.get("tie_word_embeddings", any(kinds)):
        return {}
    return {HEAD: embeddings[0]}


def untied(weights: Weights, twins: Mapping[str, tuple[str, str]], wanted: Mapping[str, Tensor]) -> list[str]:
    """Tensors that the model ties and the checkpoint has twice, with other numbers in this rank's part."""
    faults = list[str]()
    for name in twins.keys() & wanted.keys():
        parts = [wanted[name].detach().clone() for _ in twins[name]]
        for source, part in zip(twins[name], parts, strict=True):
            fill(weights, {name: source}, {name: part})
        if not torch.equal(*map(local, parts)):
            faults.append(" and ".join(map(plain, twins[name])))
    return names.listed("tied here and different there", faults)


def unlike(weights: Weights, sources: Mapping[str, str], wanted: Mapping[str, Tensor]) -> list[str]:
    """Tensors that have another shape, or a type that does not become that of the model."""
    shapes, dtypes = list[str](), list[str]()
    for name in wanted.keys() & sources.keys():
        stored, tensor = weights.tensors[sources[name]], wanted[name]
        dtype = getattr(torch, stored.dtype)
        if stored.shape != tuple(tensor.shape):
            shapes.append(f"{sources[name]} is {list(stored.shape)} there, {list(tensor.shape)} here")
        quantized = dtype.itemsize == 1 and dtype.is_floating_point and dtype != tensor.dtype
        if dtype.is_floating_point != tensor.dtype.is_floating_point or quantized:
            dtypes.append(f"{sources[name]} is {stored.dtype} there, {str(tensor.dtype).removeprefix('torch.')} here")
    return [*names.listed("of another shape", shapes), *names.listed("of another type", dtypes)]


def check(source: str, mesh: Mesh, faults: list[str], hint: str) -> None:
    """Raises ForeignError on all ranks with the faults of all."""
    if every := list(dict.fromkeys(itertools.chain.from_iterable(mesh.gather(faults)))):
        raise ForeignError.during("load", source, f"its weights are not those of the model. {'; '.join(every)}", hint)


def _opened(source: str, mesh: Mesh, table: Any) -> tuple[Weights, names.Table]:
    """On every rank, or an error on all."""
    found = list[tuple[Weights, names.Table]]()
    mesh.on_all(f"load {source}", lambda: found.append((place.open_at(source), names.table(table))))
    return found[0]


def fill(
    weights: Weights, sources: Mapping[str, str], wanted: Mapping[str, Tensor], sums: Sums | None = None,
    *, apart: Collection[exchange.Key] = (),
) -> None:  # fmt: skip
    """Copy this rank's part of each tensor, without the pieces `apart`, and note its sum. Raises ForeignError if pieces
    leave a hole.
    """
    tasks = list[Callable[[], None]]()
    for name, tensor in wanted.items():
        stored = weights.tensors[sources[name]]
        pieces = [
            {"shape": piece.shape, "offset": piece.offset, "piece": piece, "key": (name, number)}
            for number, piece in enumerate(stored.pieces)
        ]
        overlap = ShardOverlap(tensor, pieces)
        covered = sum(math.prod(part.stop - part.start for part in ours) for _, _, ours in overlap.overlaps)
        if covered != overlap.memory.numel():
            raise ForeignError.during("load", weights.url, f"its pieces do not cover {sources[name]} exactly once")
        note = partial(sums.add, name, shape=stored.shape) if sums else None
        alone = [number for number, (piece, *_) in enumerate(overlap.overlaps) if piece["key"] not in apart]
        tasks += [_copy(overlap, number, stored.dtype, note) for number in alone]
    with ThreadPoolExecutor(STREAMS) as pool:
        for done in pool.map(lambda task: task(), tasks):
            assert done is None


def _copy(overlap: ShardOverlap, number: int, dtype: str, note: Callable[..., None] | None) -> Callable[[], None]:
    piece, theirs, ours = overlap.overlaps[number]

    def copy() -> None:
        value = target = overlap.memory[ours]
        as_there = note is None or target.dtype == getattr(torch, dtype)  # the sum is of the numbers in the file
        with torch.no_grad():
            if not as_there or not _read_into(target, piece["piece"], dtype, theirs):
                value = read(piece["piece"], dtype, theirs)
                target.copy_(value)
        if note:
            begins = [begin + part.start for begin, part in zip(piece["offset"], theirs, strict=True)]
            note(offset=begins, value=value)

    return copy


def _read_into(target: Tensor, piece: Piece, dtype: str, box: tuple[slice, ...]) -> bool:
    """Read the runs of a local file into the memory of `target` itself, or into a small buffer from which they are
    converted; whether that is possible.
    """
    plain_rows = not piece.packed and piece.stride == contiguous(piece.shape) and store.is_local(piece.url)
    if not plain_rows or not target.is_cpu or not target.is_contiguous() or not target.numel():
        return False
    kind = getattr(torch, dtype)
    begins, count, _ = _rows(piece, box, kind.itemsize)
    flat = target.view(-1)
    if target.dtype == kind:
        _read_runs(piece.url, [(begin, count) for begin in begins], flat)
        return True
    most = BUFFER // kind.itemsize * kind.itemsize
    parts = ((begin + low, min(most, count - low)) for begin in begins for low in range(0, count, most))
    buffer, done = torch.empty(BUFFER // kind.itemsize, dtype=kind), 0
    for runs in _up_to(most, parts):
        size = sum(length for _, length in runs) // kind.itemsize
        _read_runs(piece.url, runs, buffer[:size])
        flat[done : done + size].copy_(buffer[:size])
        done += size
    return True


def _up_to(most: int, runs: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The runs (first byte, bytes) in groups of at most so many bytes."""
    group, size = list[tuple[int, int]](), 0
    for begin, count in runs:
        if group and size + count > most:
            yield group
            group, size = [], 0
        group.append((begin, count))
        size += count
    yield group


def _read_runs(url: str, runs: Sequence[tuple[int, int]], target: Tensor) -> None:
    """Raises ForeignError if the file is cut off."""
    memory = target.view(torch.uint8).numpy().data
    if read_into(url, runs, memory) != len(memory):
        raise ForeignError.during("read", url, "it is cut off")


def read_into(url: str, runs: Sequence[tuple[int, int]], target: memoryview) -> int:
    """Fill `target` with runs (first byte, bytes) of a local file, one after the other; returns how many bytes there
    were. Raises StoreError.
    """

    def fill_memory(path: Path) -> int:
        done = 0
        with a_file(path).open("rb", buffering=0) as file:
            for begin, count in runs:
                end, start = done + count, done
                while done < end and (got := os.preadv(file.fileno(), [target[done:end]], begin + done - start)):
                    done += got  # at most 2 GiB at a time
        return done

    return on_disk("read", url, fill_memory)


def read(piece: Piece, dtype: str, box: tuple[slice, ...]) -> Tensor:
    """The part of a piece within `box`, of which only the bytes are read. Raises ForeignError, StoreError."""
    if piece.packed:
        piece = _unpacked(piece, dtype)
    shape = tuple(part.stop - part.start for part in box)
    kind = getattr(torch, dtype)
    if not math.prod(shape):
        return torch.empty(shape, dtype=kind)
    if piece.stride != contiguous(piece.shape):
        return _strided(piece, kind)[box]
    begins, count, dims = _rows(piece, box, kind.itemsize)
    gap = begins[1] - begins[0] - count if len(begins) > 1 else 0
    if gap and not store.is_local(piece.url) and gap <= exchange.GAP:
        whole = (slice(box[0].start, box[0].stop), *(slice(0, size) for size in piece.shape[1:]))
        return read(piece, dtype, whole)[(slice(None), *box[1:])]
    parts = store.parts(piece.url, begins, count)
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(data) != count * len(begins):
        raise ForeignError.during("read", piece.url, "it is cut off")
    assert dims == shape
    return tensor_of(data, Entry(kind, shape, 0))


def _rows(piece: Piece, box: tuple[slice, ...], size: int) -> tuple[list[int], int, tuple[int, ...]]:
    """(first byte of each run of a box in a contiguous piece, bytes of a run, shape of the box)."""
    shape = tuple(part.stop - part.start for part in box)
    inner = len(shape)
    while inner and shape[inner - 1] == piece.shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # the dims from here on are one run: only the first of them is not whole
    count = math.prod(shape[inner:]) * size
    base = piece.begin + sum(part.start * step for part, step in zip(box, piece.stride, strict=True)) * size
    outer = itertools.product(*(range(0, n * step, step) for n, step in zip(shape[:inner], piece.stride, strict=False)))
    return [base + sum(steps) * size for steps in outer], count, shape


def _strided(piece: Piece, kind: torch.dtype) -> Tensor:
    """A whole piece that is not contiguous in its file, such as a transposed one."""
    span = 1 + sum((n - 1) * step for n, step in zip(piece.shape, piece.stride, strict=True))
    data = store.parts(piece.url, [piece.begin], span * kind.itemsize)[0]
    return tensor_of(data, Entry(kind, (span,), 0)).as_strided(piece.shape, piece.stride)


def _unpacked(piece: Piece, dtype: str) -> Piece:
    """Where the numbers of a piece lie, which is a file of torch.save in another file."""
    found = list(torchfile.tensors(piece.url, piece.begin, piece.packed).values())
    wide = [size for size in piece.shape if size != 1]
    if len(found) != 1 or found[0].dtype != dtype or [size for size in found[0].shape if size != 1] != wide:
        raise ForeignError.during("read", piece.url, "a shard in it is not as its metadata says")
    inside = found[0].pieces[0]
    steps = iter(step for size, step in zip(inside.shape, inside.stride, strict=True) if size != 1)
    stride = tuple(1 if size == 1 else next(steps) for size in piece.shape)
    rows = inside.stride == contiguous(inside.shape)
    return replace(inside, shape=piece.shape, stride=contiguous(piece.shape) if rows else stride)
