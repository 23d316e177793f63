"""The header of a safetensors file, which names every tensor and the place of its bytes. Readers do not trust it.

8 bytes with the length of a JSON header, the header, and the data:
https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dtrain.storage import store
from dtrain.weights import SIZES, ForeignError, Piece, Stored, contiguous

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip
HEADER_BYTES = 100_000_000
"""Longest header that is read, as in the reference reader."""


class Row(NamedTuple):
    """A tensor of a header. `begin`: the offset of its first byte from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


def tensors(url: str) -> dict[str, Stored]:
    """The tensors of the file at `url`, by its header alone. Raises ForeignError, StoreError."""
    size = store.size(url)
    try:
        length = int.from_bytes(store.parts(url, [0], 8)[0], "little") if size >= 8 else 0
        start = begin_of(length, size)
        rows, _ = parse(store.parts(url, [8], length)[0], start, size)
    except ValueError as error:
        raise ForeignError.during("read", url, f"it is not a whole safetensors file ({error})") from error
    return {name: stored(url, *row) for name, row in rows.items()}


def stored(url: str, dtype: str, shape: tuple[int, ...], begin: int) -> Stored:
    """A tensor that is one piece of rows."""
    return Stored(dtype, shape, (Piece((0,) * len(shape), shape, url, begin, contiguous(shape)),))


def begin_of(length: int, size: int) -> int:
    """Where the data begins in a file of `size` bytes with a header of `length`. Raises ValueError."""
    if size < 8 or length > min(size - 8, HEADER_BYTES):
        raise ValueError("the length of its header is wrong")
    return 8 + length


def parse(head: bytes, start: int, size: int) -> tuple[dict[str, Row], dict[str, str]]:
    """The tensors and the metadata of a header, whose data is from `start` to `size` of its file. Raises ValueError."""
    read = mapping(strict(head))
    mark = {key: str(value) for key, value in mapping(read.pop("__metadata__", {})).items()}
    rows, end = {name: _row(mapping(facts), start, size) for name, facts in read.items()}, start
    for name, row in sorted(rows.items(), key=lambda one: (one[1].begin, math.prod(one[1].shape))):
        if row.begin < end:
            raise ValueError(f"its header has two entries for the same bytes, one of them {name[:80]!r}")
        end = row.begin + math.prod(row.shape) * SIZES[row.dtype]
    return rows, mark


def strict(data: bytes) -> Any:
    """Parse JSON without duplicate names. Raises ValueError if it is malformed."""
    try:
        return json.loads(data, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def numbers(value: object) -> tuple[int, ...]:
    """The value as a tuple. Raises ValueError unless it is a list of integers >= 0."""
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise ValueError(f"{str(value)[:40]} is not a list of sizes")
    return tuple(value)


def mapping(value: object) -> dict[str, Any]:
    """The value itself. Raises ValueError unless it is a mapping."""
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]} is not a mapping")
    return value


def _row(facts: Mapping[str, Any], start: int, size: int) -> Row:
    dtype, offsets = DTYPES.get(str(facts.get("dtype"))), numbers(facts.get("data_offsets"))
    if dtype is None or len(offsets) != 2:
        raise ValueError(f"its header has an entry that is not a tensor: {str(facts)[:80]}")
    if math.prod(filter(None, numbers(facts.get("shape")))) >> 63:
        raise ValueError(f"its header has an entry of an impossible size: {str(facts)[:80]}")
    row = Row(dtype, numbers(facts.get("shape")), start + offsets[0])
    end = row.begin + math.prod(row.shape) * SIZES[dtype]
    if end != start + offsets[1] or end > size:
        raise ValueError(f"its header has an entry outside of the file: {str(facts)[:80]}")
    return row


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("it has a name twice")
    return data
