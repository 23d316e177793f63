"""A file of tokens, memory-mapped and read without torch: .npy, or .bin of little-endian unsigned integers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dtrain.errors import StoreError
from dtrain.storage import disk, mapped

KINDS = ("uint8", "uint16", "uint32")
CHUNK = 1 << 22
"""Tokens checked at once."""


def opened(file: Path, url: str, dtype: str) -> NDArray[Any]:
    """The tokens in `file`, memory-mapped, which was read from `url`; `dtype` is the type of a .bin file's tokens.
    Raises StoreError if it has none.
    """
    try:
        mapped.note(disk.a_file(file))
        array: NDArray[Any] = (
            np.load(file, mmap_mode="r", allow_pickle=False)
            if file.suffix == ".npy"
            else np.memmap(file, dtype=dtype, mode="r")
        )
    except (ValueError, OSError) as error:
        raise StoreError.during("read tokens of", url, getattr(error, "strerror", None) or error) from error
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise StoreError.during(
            "read tokens of", url, f"one row of integers is expected, not {array.ndim} dims of {array.dtype}"
        )
    return array


def outside(arrays: Sequence[NDArray[Any]], vocab: int, *, most: int | None = None) -> str:
    """A sentence about the smallest or largest token outside 0 .. vocab-1; empty if there is none.

    `most`: check at most this many tokens, evenly spread over all files; None checks every token.
    """
    total = sum(map(len, arrays))
    stride = 1 if most is None else max(1, -(-total // most))
    size = max(1, CHUNK // stride)
    parts = [array[start : start + size] for array in arrays for start in range(0, len(array), size * stride)]
    least = min((int(part.min()) for part in parts), default=0)
    largest = max((int(part.max()) for part in parts), default=0)
    if least < 0:
        return f"token {least} is negative."
    if largest >= vocab:
        return f"token {largest} is outside data.vocab={vocab}. Type data.vocab={largest + 1} or more."
    return ""
