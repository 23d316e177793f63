"""The safetensors files of a checkpoint, as torch's tensors. Readers do not trust the bytes."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dtrain.weights import safetensors

DTYPES: dict[str, torch.dtype] = {tag: getattr(torch, name) for tag, name in safetensors.DTYPES.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


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
    start = safetensors.begin_of(int.from_bytes(view[:8], "little"), len(view))
    rows, mark = safetensors.parse(bytes(view[8:start]), start, len(view))
    return {name: Entry(getattr(torch, row.dtype), row.shape, row.begin) for name, row in rows.items()}, mark
