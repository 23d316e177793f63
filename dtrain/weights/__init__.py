"""Checkpoints that others wrote: the name, shape, dtype and place of every tensor, read from headers alone, without
torch. No code in them runs.

    weights = dtrain.weights.place.open_at("hf://gpt2")     a folder of Hugging Face, a .pt, a .ckpt, torch's DCP
    weights.tensors["wte.weight"].shape
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.errors import StoreError


class ForeignError(StoreError):
    """A checkpoint of others that cannot be used. The message names the file, the cause and what to type."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, and the place of its bytes: `begin` is that of its first element in the file at `url`.

    `offset`, `shape`: in elements of the whole tensor; `stride`: in elements, of this piece in the file. `packed`: if
    not 0, `begin` is that of a file of torch.save of so many bytes, which holds this piece alone.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    url: str
    begin: int
    stride: tuple[int, ...]
    packed: int = 0


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint. `dtype`: its name in torch, such as bfloat16."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Weights:
    """`kind`: what lies at `url`, for people; `config`: config.json of transformers, if it is beside the weights."""

    url: str
    kind: str
    tensors: Mapping[str, Stored]
    config: Mapping[str, Any] | None = field(default=None, repr=False)


SIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e5m2": 1, "float8_e4m3fn": 1, "complex64": 8,
    "bool": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
}  # fmt: skip
"""Bytes of an element, by the name of its type in torch."""


def plain(text: object, most: int = 120) -> str:
    """A name from a checkpoint in a message: on one line, and not too long."""
    return "".join(mark if mark.isprintable() else "?" for mark in str(text)[:most])


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major tensor, in elements."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
