"""Compares two runs: losses and norms of every step, gradients and updates of the first step, and the final weights,
tensor by tensor.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from dtrain.checkpoint.commit import find
from dtrain.storage import store

TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "float32": {"loss": 2e-6, "norm": 1e-5, "gradients": 1e-5, "updates": 1e-3, "weights": 1e-4},
    "bfloat16": {"loss": 3e-2, "norm": 1e-1, "gradients": 1e-1, "weights": 1e-1},
    "float16": {"loss": 2e-3, "norm": 2e-2, "gradients": 2e-2, "weights": 3e-2},
}
"""Largest relative difference allowed, by the type of matrix products. Tensors are compared by L2 norm, because AdamW
turns the rounding errors of single near-zero gradients into full steps.

Measured on gloo over 20 steps with AdamW: fp32 1e-6, 2e-7 and 4e-5; bf16 1e-3 to 1e-2, because sums in another order
round to 8 bits. In bf16 the first updates of AdamW, which are signs, are not compared.
"""
ROUNDING: Mapping[str, float] = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}
"""Upper bound of the rounding error of a gradient, as a fraction of the root mean square of all gradients."""
GROWN = 50
"""The factor by which `ROUNDING` grows over a few steps."""
TIMES, ALONE, MUCH = 10, 1e-3, 1000
"""A tensor that differs when one process splits its batch in two may differ TIMES as much on another mesh; MUCH times
as much if it is rounding error alone (it differs by more than the fraction ALONE of itself).
"""
MOMENTS = (".exp_avg", ".momentum_buffer")
"""Suffixes of optimizer states that are averages of gradients."""
SMALL = 1e-3
"""Updates of elements whose gradient is below this fraction of the tensor's RMS are not compared; also the smallest
size, relative to the RMS of the model, that a weight is compared to.
"""


@dataclass(frozen=True)
class Row:
    """The largest difference of one quantity, and `where` it is.

    `first` is the first place above `allowed`, at `step`; `compared` the number of tensors; `rounded` the number of
    tensors left out because their gradient is mostly rounding error, which some optimizers turn into full steps.
    """

    quantity: str
    difference: float
    where: str
    allowed: float
    first: str | None
    step: int | None = None
    compared: int = 0
    rounded: int = 0


@dataclass(frozen=True)
class First:
    """A run's first step, as its ranks recorded it: full tensors, the generators used, and the samples of each rank."""

    step: int
    drawn: list[str]
    gradients: dict[str, Tensor]
    updates: dict[str, Tensor]
    weights: dict[str, Tensor]
    samples: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    """(rank, place) -> (sample, digest)."""


def compare(asked: str, one: str, compute: str, *, parts: str | None = None, weights: bool = True) -> list[Row]:
    """Compare the runs under two URLs. `parts` is the run of one process that splits its batch, which shows the size of
    rounding errors; `compute` the type of matrix products. Raises StoreError if a run has no rows or no checkpoint.
    """
    allowed = TOLERANCES[compute]
    mine, reference = _rows(asked), _rows(one)
    steps = sorted(mine.keys() | reference.keys())
    rows = []
    for name in ("loss", "norm"):
        pairs = ((step, mine.get(step, {}).get(name), reference.get(step, {}).get(name)) for step in steps)
        rows.append(_worst(name, allowed[name], ((f"step {step}", _relative(*pair)) for step, *pair in pairs)))
    here, there, beside = first(asked), first(one), first(parts) if parts else None
    quiet = _rounded(beside.gradients, there.gradients, ROUNDING[compute]) if beside and there else None
    if here and there and here.step == there.step:
        rows += _first_rows(here, there, beside, quiet or set(), allowed)
    if not weights:
        return rows
    ours, theirs, others = _weights(asked), _weights(one), _weights(parts) if parts else {}
    moments, averages = (
        {name: tensor for name, tensor in each.items() if name.endswith(MOMENTS)} for each in (others, theirs)
    )
    if averages:
        later = {
            name.removeprefix("optim.").rpartition(".")[0]
            for name in _rounded(moments, averages, GROWN * ROUNDING[compute])
        }
        quiet = later if quiet is None else quiet & later
    model = {name: tensor for name, tensor in theirs.items() if name.startswith("model.")}
    ours, theirs, others = (
        {name.removeprefix("model."): each[name] for name in model if name in each} for each in (ours, theirs, others)
    )
    floor = SMALL * _rms(model.values())
    return [
        *rows,
        _tensors(
            "weights",
            allowed=allowed["weights"],
            here=ours,
            there=theirs,
            beside=others,
            quiet=quiet or set(),
            floor=floor,
        ),
    ]


def first_difference(rows: Sequence[Row]) -> str | None:
    """The earliest difference that is too large, such as `loss at step 1`; weights count as last."""
    bad = sorted((row for row in rows if row.first), key=lambda row: float("inf") if row.step is None else row.step)
    if not bad:
        return None
    row = bad[0]
    if row.quantity in ("loss", "norm"):
        return f"{row.quantity} at {row.first}"
    return f"{row.quantity.removesuffix('s')} of {row.where}" + (f" at step {row.step}" if row.step else "")


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def first(out: str) -> First | None:
    """The records of a run's first step; None if there are none, as with your own loop."""
    names = sorted(store.sizes(store.join(out, "first")))
    notes = [json.loads(store.read(store.join(out, "first", name))) for name in names if name.endswith(".json")]
    if not notes:
        return None
    files = {name: load(store.read(store.join(out, "first", name))) for name in names if name.endswith(".safetensors")}
    tensors: dict[str, Tensor] = {}
    for file, note in zip(files.values(), notes, strict=True):
        for piece in note["pieces"]:
            _put(tensors, piece["name"], note["shapes"][piece["name"]], piece, file[piece["name"]])
    gradients, updates, weights = (
        {name.removeprefix(f"{kind}."): each for name, each in tensors.items() if name.startswith(f"{kind}.")}
        for kind in ("gradient", "update", "weight")
    )
    samples: dict[tuple[int, int], tuple[int, str]] = {}
    for rank, note in enumerate(notes):
        samples |= {(rank, place): (sample, digest) for place, sample, digest in note["samples"]}
    drawn = sorted({name for note in notes for name in note["drawn"]})
    return First(
        step=notes[0]["step"], drawn=drawn, gradients=gradients, updates=updates, weights=weights, samples=samples
    )


def other_sample(asked: str, one: str) -> tuple[int, int] | None:
    """(sample, rank) of the first sample that differs between a rank of `asked` and the run of `one` process."""
    here, there = first(asked), first(one)
    for (rank, place), (sample, digest) in here.samples.items() if here and there else ():
        if there and there.samples.get((0, place), (sample, digest))[1] != digest:
            return sample, rank
    return None


def other_call(out: str) -> int | None:
    """The number of the first call of the model that gave another output for the same input; None if none did."""
    if not store.exists(url := store.join(out, "calls.json")):
        return None
    number: int | None = json.loads(store.read(url))
    return number


def random_data(out: str) -> bool:
    """Whether samples differ each time they are read."""
    _, commit = find(out)
    stream = commit["facts"].get("stream") or {}
    return str(stream.get("fingerprint", "")).endswith("-random")


def _first_rows(
    here: First, there: First, beside: First | None, quiet: set[str], allowed: Mapping[str, float]
) -> Iterator[Row]:
    floor = 1e-6 * _rms(there.gradients.values())
    others = beside.gradients if beside else {}
    yield _tensors(
        "gradients",
        allowed=allowed["gradients"],
        here=here.gradients,
        there=there.gradients,
        beside=others,
        quiet=quiet,
        floor=floor,
        step=there.step,
    )
    if "updates" in allowed:
        ours, theirs, more = (_clear(each, there) if each else {} for each in (here, there, beside))
        lost = {name: _rms([weight]) * torch.finfo(torch.float32).eps for name, weight in there.weights.items()}
        yield _tensors(
            "updates",
            allowed=allowed["updates"],
            here=ours,
            there=theirs,
            beside=more,
            quiet=quiet,
            floor=0.0,
            lost=lost,
            step=there.step,
        )


def _clear(record: First, there: First) -> dict[str, Tensor]:
    """Updates of the elements whose gradient is not tiny compared with the rest of its tensor."""
    updates = {}
    for name, update in record.updates.items():
        gradient = there.gradients.get(name)
        if gradient is not None and gradient.shape == update.shape:
            updates[name] = update[gradient.abs() > SMALL * gradient.square().mean().sqrt()]
    return updates


def _tensors(
    quantity: str,
    allowed: float,
    here: Mapping[str, Tensor],
    there: Mapping[str, Tensor],
    beside: Mapping[str, Tensor],
    quiet: set[str],
    floor: float,
    *,
    lost: Mapping[str, float] | None = None,
    step: int | None = None,
) -> Row:
    """Compare tensor by tensor. Tensors in `quiet` may differ by a multiple of the rounding error of `beside`; `lost`
    is the rounding error of adding an update to its weight.
    """
    differences, rounded = [], 0
    for name in sorted(here.keys() | there.keys()):
        apart = _apart(here.get(name), there.get(name), floor)
        if name in quiet and allowed < apart < float("inf"):
            noise = _apart(beside.get(name), there[name], floor)
            apart = max(0.0, apart - (MUCH if noise > ALONE else TIMES) * noise)
            rounded += apart <= allowed
        if lost and allowed < apart < float("inf"):
            size = float(there[name].norm())
            apart = max(0.0, apart - 2 * lost[name] * there[name].numel() ** 0.5 / max(size, 1e-30))
        differences.append((name, apart))
    return _worst(quantity, allowed, differences, step, compared=len(differences), rounded=rounded)


def _rounded(beside: Mapping[str, Tensor], there: Mapping[str, Tensor], most: float) -> set[str]:
    """Tensors whose gradients (or their averages) differ by rounding alone when one process splits its batch."""
    bound = most * _rms(there.values())
    return {
        name
        for name, tensor in there.items()
        if name in beside and float((beside[name] - tensor).norm()) <= bound * max(1, tensor.numel()) ** 0.5
    }


def _worst(
    quantity: str, allowed: float, differences: Iterable[tuple[str, float]], step: int | None = None, **counts: int
) -> Row:
    listed = list(differences) or [("nothing", 0.0)]
    where, worst = max(listed, key=lambda pair: pair[1] if pair[1] == pair[1] else float("inf"))
    first = next((place for place, difference in listed if not difference <= allowed), None)
    if first and first.startswith("step "):
        step = int(first.removeprefix("step "))
    return Row(
        quantity=quantity,
        difference=worst,
        where=where,
        allowed=allowed,
        first=first,
        step=step if first else None,
        **counts,
    )


def _rows(out: str) -> dict[int, dict[str, Any]]:
    lines = store.read(store.join(out, "metrics.jsonl")).decode().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def _weights(out: str) -> dict[str, Tensor]:
    """Every tensor of model and optimizer, assembled from the pieces of the newest checkpoint."""
    url, commit = find(out)
    files = {file["name"]: load(store.read(store.join(url, file["name"]))) for file in commit["files"]}
    whole: dict[str, Tensor] = {}
    for piece in commit["pieces"]:
        _put(whole, piece["name"], commit["tensors"][piece["name"]]["shape"], piece, files[piece["file"]][piece["key"]])
    return whole


def _put(whole: dict[str, Tensor], name: str, shape: Sequence[int], piece: Mapping[str, Any], part: Tensor) -> None:
    """Write a piece into its tensor, which starts as nan."""
    dtype = torch.complex128 if part.is_complex() else torch.float64
    tensor = whole.setdefault(name, torch.full(tuple(shape), torch.nan, dtype=dtype))
    region = tuple(slice(begin, begin + size) for begin, size in zip(piece["offset"], piece["shape"], strict=True))
    tensor[region] = part.to(dtype)


def _rms(tensors: Any) -> float:
    squares = [(float(tensor.abs().square().sum()), tensor.numel()) for tensor in tensors]
    return float((sum(square for square, _ in squares) / max(1, sum(count for _, count in squares))) ** 0.5)


def _relative(here: float | None, there: float | None) -> float:
    """The relative difference of two numbers; infinite if only one of them is None, which is how JSON writes nan."""
    if here is None or there is None:
        return 0.0 if here is there else float("inf")
    return abs(here - there) / max(abs(there), 1e-12)


def _apart(here: Tensor | None, there: Tensor | None, floor: float) -> float:
    """The difference relative to the norm of `there`, or to a tensor of RMS `floor` if that is larger."""
    if here is None or there is None or here.shape != there.shape:
        return float("inf")
    size = max(floor * there.numel() ** 0.5, 1e-30)
    return float((here - there).norm() / there.norm().clamp(min=size)) if there.numel() else 0.0
