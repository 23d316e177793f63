"""The two formats of a checkpoint, JSON and safetensors. Readers do not trust the bytes.

A safetensors file is 8 bytes with the length of a JSON header, the header, and the data:
https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HEADER_BYTES = 100_000_000
"""Longest header that is read, as in the reference reader."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. `begin` is the offset of its first byte, from the end of the header when writing, and from
    the start of the file when reading.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * self.dtype.itemsize


def header(entries: Mapping[str, Entry], mark: Mapping[str, str] | None = None) -> bytes:
    """The header of a file, padded so that the data begins at a multiple of 8 bytes. `mark`: its metadata."""
    facts: dict[str, Any] = {"__metadata__": dict(mark)} if mark else {}
    for name, one in entries.items():
        offsets = [one.begin, one.end]
        facts[name] = {"dtype": NAMES[one.dtype], "shape": list(one.shape), "data_offsets": offsets}
    text = json.dumps(facts, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse(data: bytes | bytearray | memoryview) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors and the metadata of a complete file. Raises ValueError if it is not a valid safetensors file."""
    view = memoryview(data)
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > min(len(view) - 8, HEADER_BYTES):
        raise ValueError("the length of its header is wrong")
    start = 8 + length
    read = mapping(strict(bytes(view[8:start])))
    mark = {key: str(value) for key, value in mapping(read.pop("__metadata__", {})).items()}
    return {name: _entry(facts, start, len(view)) for name, facts in read.items()}, mark


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


def _entry(facts: object, start: int, size: int) -> Entry:
    facts = mapping(facts)
    dtype, offsets = DTYPES.get(str(facts.get("dtype"))), numbers(facts.get("data_offsets"))
    if dtype is None or len(offsets) != 2:
        raise ValueError(f"its header has an entry that is not a tensor: {str(facts)[:80]}")
    entry = Entry(dtype, numbers(facts.get("shape")), start + offsets[0])
    if entry.end != start + offsets[1] or entry.end > size:
        raise ValueError(f"its header has an entry outside of the file: {str(facts)[:80]}")
    return entry


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("it has a name twice")
    return data
