"""Two runs held against each other: losses and gradient norms of every step, the weights at the end, and what the ranks built."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from dtrain import store
from dtrain.checkpoint.commit import find

TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "float32": {"loss": 2e-6, "norm": 1e-5, "weights": 1e-4},
    "bfloat16": {"loss": 3e-2, "norm": 1e-1, "weights": 1e-1},
    "float16": {"loss": 2e-3, "norm": 2e-2, "weights": 3e-2},
}
"""Largest relative difference, by the type of matrix products: losses and norms to their own size, weights as the L2 norm of the
difference to that of the tensor (of single weights whose gradient is all but zero, AdamW makes steps of rounding errors).

Measured on gloo over 20 steps with AdamW: fp32 1e-6, 2e-7 and 4e-5; bf16 1e-3 to 1e-2, because a sum in another order rounds to 8 bits.
"""


@dataclass(frozen=True)
class Row:
    """The largest difference of one quantity, and where it is; `first`: where it is first more than `allowed`."""

    quantity: str
    difference: float
    where: str
    allowed: float
    first: str | None


def compare(asked: str, one: str, compute: str) -> list[Row]:
    """The runs under two URLs. `compute` is the type of matrix products. Raises StoreError when a run left no rows or no checkpoint."""
    allowed = TOLERANCES[compute]
    mine, reference = _rows(asked), _rows(one)
    rows = [
        _worst(name, allowed[name], ((f"step {step}", _relative(mine.get(step, {}).get(name), row[name])) for step, row in reference.items()))
        for name in ("loss", "norm")
    ]
    theirs, weights = _weights(one), _weights(asked)
    floor = 1e-3 * float(torch.cat([tensor.flatten() for name, tensor in theirs.items() if name.startswith("model.")]).square().mean().sqrt())
    moved = [name for name in theirs if name.startswith("model.") and name not in _still(theirs)]
    rows.append(_worst("weights", allowed["weights"], ((name, _apart(weights.get(name), theirs[name], floor)) for name in moved)))
    return rows


def _still(tensors: Mapping[str, Tensor]) -> set[str]:
    """Weights whose gradient is zero but for rounding, such as a bias that a softmax cancels: AdamW makes full steps of that noise.

    Told by the second moments, where the optimizer keeps them: a gradient 1e-5 of the largest, and less.
    """
    sizes = {
        "model." + name.removeprefix("optim.").removesuffix(".exp_avg_sq"): float(moment.mean().sqrt())
        for name, moment in tensors.items()
        if name.endswith(".exp_avg_sq")
    }
    return {name for name, size in sizes.items() if size < 1e-5 * max(sizes.values())}


def first_difference(rows: list[Row]) -> str | None:
    """`loss at step 1`: of what differs by more than it may, the first in time. Weights come last: they are those of the end."""
    bad = [row for row in rows if row.first]
    steps = [(int(row.first.removeprefix("step ")), row) for row in bad if row.first and row.first.startswith("step ")]
    if steps:
        step, row = min(steps, key=lambda pair: pair[0])
        return f"{row.quantity} at step {step}"
    return f"{bad[0].quantity} of {bad[0].first}" if bad else None


def to_json(rows: list[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def _worst(quantity: str, allowed: float, differences: Iterator[tuple[str, float]]) -> Row:
    found = list(differences)
    where, worst = max(found, key=lambda pair: pair[1] if pair[1] == pair[1] else float("inf"))
    first = next((place for place, difference in found if not difference <= allowed), None)
    return Row(quantity, worst, where, allowed, first)


def _rows(out: str) -> dict[int, dict[str, Any]]:
    lines = store.read(store.join(out, "metrics.jsonl")).decode().splitlines()
    return {row["step"]: row for row in map(json.loads, lines)}


def _weights(out: str) -> dict[str, Tensor]:
    """Every tensor of model and optimizer, whole, put together from the pieces of the newest checkpoint."""
    url, commit = find(out)
    files = {file["name"]: load(store.read(store.join(url, file["name"]))) for file in commit["files"]}
    whole: dict[str, Tensor] = {}
    for piece in commit["pieces"]:
        part = files[piece["file"]][piece["key"]]
        tensor = whole.setdefault(piece["name"], torch.full(commit["tensors"][piece["name"]]["shape"], torch.nan, dtype=torch.float64))
        tensor[tuple(slice(begin, begin + size) for begin, size in zip(piece["offset"], piece["shape"], strict=True))] = part.double()
    return whole


def _relative(here: float | None, there: float | None) -> float:
    """JSON has no word for nan: two of them agree, one does not."""
    if here is None or there is None:
        return 0.0 if here is there else float("inf")
    return abs(here - there) / max(abs(there), 1e-12)


def _apart(here: Tensor | None, there: Tensor, floor: float) -> float:
    """Relative to `there`, or to numbers of size `floor`, a thousandth of the model's, where it is all but zero."""
    if here is None or here.shape != there.shape:
        return float("inf")
    return float((here - there).norm() / there.norm().clamp(min=max(floor * there.numel() ** 0.5, 1e-12))) if there.numel() else 0.0
