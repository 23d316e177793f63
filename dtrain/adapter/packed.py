"""Linear layers whose frozen weight is held in 4 bits: NF4 (QLoRA, arXiv 2305.14314), by bitsandbytes.

`weight` keeps its name, shape and type, but has no memory (it is on the meta device); the numbers are in buffers that
no checkpoint holds, 64 of them with one scale. Every product unpacks the weight of its layer, and so does its backward.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.errors import PreflightError

BLOCK, NESTED = 64, 256
"""Numbers with one scale, and scales with one of their own where they are in 8 bits."""
MISSING = "adapter: a base in 4 bits needs the bitsandbytes package. Type: pip install 'dtrain[qlora]'"


class Packed(nn.Linear):
    """A linear layer with a frozen weight that is packed when it is read."""

    nested: bool
    """Whether the scales are in 8 bits."""

    @property
    def bits(self) -> float:
        """Of a number, with its part of the scales."""
        return 4 + (8 + 32 / NESTED if self.nested else 32) / BLOCK

    def pack(self, weight: Tensor) -> None:
        """Hold these numbers, [out, in] on any device, from now on. Raises PreflightError without bitsandbytes."""
        functional = library()
        data, state = functional.quantize_4bit(
            weight.detach().contiguous(), blocksize=BLOCK, compress_statistics=self.nested, quant_type="nf4"
        )
        held = {"packed": data, "scales": state.absmax}
        if self.nested:
            held |= {"offset": state.offset, "scales_of": state.state2.absmax, "scales_code": state.state2.code}
        for name, tensor in held.items():
            self.register_buffer(name, tensor, persistent=False)
        if not self.weight.is_meta:
            self.weight = nn.Parameter(self.weight.detach().to("meta"), requires_grad=False)

    def unpacked(self) -> Tensor:
        """The weight [out, in], in its type; before it is packed, what it is now."""
        if "packed" not in self._buffers:
            return self.weight.detach()
        functional = library()
        second = None
        if self.nested:
            second = functional.QuantState(
                absmax=self.scales_of, code=self.scales_code, blocksize=NESTED, dtype=torch.float32
            )
        state = functional.QuantState(
            absmax=self.scales, shape=self.weight.shape, blocksize=BLOCK, quant_type="nf4", dtype=self.weight.dtype,
            offset=self.offset if self.nested else None, state2=second,
        )  # fmt: skip
        return cast(Tensor, functional.dequantize_4bit(self.packed, state))

    def product(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        out: Tensor = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return out

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input)


class _Product(torch.autograd.Function):
    """x W' + b, whose backward needs nothing but the packed weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: Packed) -> Tensor:
        ctx.layer, ctx.kind = layer, input.dtype
        return F.linear(input, layer.unpacked(), layer.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad @ ctx.layer.unpacked().to(grad.dtype)).to(ctx.kind), None


def rounded(weight: Tensor, *, nested: bool) -> Tensor:
    """The numbers that a layer computes with once it holds `weight` packed. Raises PreflightError."""
    layer = Packed(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype)
    layer.nested = nested
    layer.pack(weight)
    return layer.unpacked()


def library() -> Any:
    """bitsandbytes.functional. Raises PreflightError if it is not installed."""
    try:
        with _offline():
            import bitsandbytes.functional
    except ImportError as error:
        raise PreflightError(MISSING) from error
    return bitsandbytes.functional


@contextmanager
def _offline() -> Iterator[None]:
    """A context in which an import fetches no kernel from the hub, as bitsandbytes does where `kernels` is there."""
    if "bitsandbytes" in sys.modules or "kernels" in sys.modules:
        yield
        return
    sys.modules["kernels"] = None  # type: ignore[assignment]
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        del sys.modules["kernels"]
