"""A digest of tensors that ranks read in parts: the same however they are cut, from the bytes that are read anyway.

Each element, as an unsigned word, is scattered and multiplied by a key of its row, and that by a key of its column; a
tensor has the sum modulo 2^64. The keys are odd, so that any other value of one element gives another sum.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.weights import SIZES, Stored

BLOCK = 1 << 16
"""Elements that are summed at a time: they stay in the cache of a core."""

Row = Sequence[Any]
"""[name, offset, shape, sum] of a part of a tensor, as JSON."""


class Sums:
    """The sums of the parts that this rank reads; threads may add to it."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, name: str, offset: Sequence[int], value: Tensor, shape: Sequence[int]) -> None:
        """Note a part, as it is in the file, of the tensor `name` of this `shape`."""
        self.rows.append([name, list(offset), list(value.shape), part_sum(value, offset, shape)])


def digest(rows: Iterable[Row], tensors: Mapping[str, Stored]) -> str:
    """The digest of tensors by the rows of all ranks, which may have read the same part. Raises ValueError for one
    that was not read whole.
    """
    parts = {(name, *map(tuple, place)): number for name, *place, number in rows}
    counts, sums = dict.fromkeys(tensors, 0), dict.fromkeys(tensors, 0)
    for (name, _, shape), number in parts.items():
        counts[name] += math.prod(shape)
        sums[name] += number
    whole = hashlib.sha256()
    for name, one in sorted(tensors.items()):
        if counts[name] != math.prod(one.shape):
            raise ValueError(f"of {name} {counts[name]} elements were read")
        whole.update(f"{name} {one.dtype} {[*one.shape]} {sums[name] % 2**64:016x}\n".encode())
    return whole.hexdigest()


def part_sum(value: Tensor, offset: Sequence[int], shape: Sequence[int]) -> int:
    """The sum of the part `value` that begins at `offset` in a tensor of this `shape`."""
    if not value.numel():
        return 0
    size, dims = SIZES[str(value.dtype).removeprefix("torch.")], value.ndim or 1
    kind: Any = np.uint64 if size == 8 else np.uint32
    shift = kind(31 if size == 8 else 15)
    data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().view(f"u{size}")
    words = data.reshape(-1, value.shape[-1] if value.ndim else 1)
    begins, sizes, whole = (tuple(each) or (fill,) for each, fill in ((offset, 0), (value.shape, 1), (shape, 1)))
    rows = np.zeros((1,) * dims, np.uint64)
    for dim in range(dims - 1):
        step = math.prod(whole[dim + 1 : -1])
        along = np.arange(begins[dim], begins[dim] + sizes[dim], dtype=np.uint64) * np.uint64(step)
        rows = rows + along.reshape([-1 if each == dim else 1 for each in range(dims)])
    row_keys = _keys(rows.reshape(-1)).astype(kind)[:, None]
    columns = np.zeros(words.shape[1], np.uint64)
    count = max(1, BLOCK // words.shape[1])
    for begin in range(0, len(words), count):
        block = words[begin : begin + count].astype(kind, copy=False)
        mixed = block >> shift
        mixed ^= block
        mixed *= row_keys[begin : begin + count]
        columns += mixed.sum(0, dtype=np.uint64)
    column_keys = _keys(np.arange(begins[-1], begins[-1] + sizes[-1], dtype=np.uint64) + np.uint64(1 << 63))
    return int((columns * column_keys).sum())


def _keys(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """An odd key for each number: the finaliser of SplitMix64 (https://prng.di.unimi.it/splitmix64.c)."""
    keys = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (keys ^ (keys >> np.uint64(31))) | np.uint64(1)
