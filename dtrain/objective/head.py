"""Logits that are computed a few tokens at a time, inside the loss: a decoder's head leaves its product to whoever
reads its result.

A loss that takes `Deferred` logits (dtrain/objective/chunked.py) never has more than a chunk of them. Anything else
that touches them, such as a softcap in the model's forward or a metric, computes them whole, as without this file; what
changes them in place, or could by a view, is what the loss sees.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_leaves, tree_map_only

from dtrain.errors import WordsError
from dtrain.model import blocks, tables, unwrapped
from dtrain.predict.chunks import in_chunks

NOTES = {
    getattr(Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_meta",
        "_base",
    )
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.ndimension}
"""Facts of a tensor that need none of its values."""
_set_data = Tensor.data.__set__  # type: ignore[attr-defined]
MARKS = {Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_, _set_data}
"""Calls that stay with a tensor, beside changes of its values."""


@dataclass(frozen=True)
class LossOptions:
    """How losses of a large vocabulary are computed: over chunks of so many tokens (`auto`; 0: of whole logits).
    `again`: a backward computes the logits of chunks again. `compiled`: what lies between the products is. `weight`:
    the gradient of the loss that its backward will get, 0-dim, if it is this tensor: gradients of chunks are formed
    with it.
    """

    chunk: int | str = 0
    again: bool = False
    compiled: bool = False
    weight: Tensor | None = None


WRITTEN = {"cpu"}
"""Devices on which a loss is never compiled: torch's kernels in a cache take a third to a half of the time of what its
compiler makes of the loss (tests/bench/RESULTS.md), whose exponentials are less exact.
"""
_options = LossOptions()


def compiles(logits: Tensor) -> bool:
    """Whether the loss of these whole logits is compiled; not where a backward may run in two parts."""
    return _options.compiled and not _options.again and logits.device.type not in WRITTEN


@contextmanager
def deferring(
    chunk: int | str, *, again: bool = False, compiled: bool = False, weight: Tensor | None = None
) -> Iterator[None]:
    """Inside, losses are computed so, and heads of a large vocabulary defer their products for them."""
    global _options
    before, _options = _options, LossOptions(chunk, again, compiled, weight)
    try:
        yield
    finally:
        _options = before


class Head(nn.Linear):
    """A linear layer to logits, which `deferring` puts off."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # hooks on the result need its gradient
            may = input.requires_grad and torch._C._current_graph_task_id() < 0
        else:  # with the line above: not in a reentrant checkpoint, which hands out the gradient of its result
            may = not self.training
        if may and in_chunks(_options.chunk, self.out_features):
            return Deferred(input, self.weight, self.bias, _options)
        return super().forward(input)


class Deferred(Tensor):
    """Logits [..., V] = `hidden` [..., C] @ `weight` [V, C] + `bias`, not computed yet. `options`: of their loss.
    `finish`: what tensor parallelism does to the product.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    options: LossOptions
    autocast: torch.dtype | None
    """The type of autocast where the head was called."""
    finish: Callable[[Tensor], Tensor] | None
    loss: Callable[[Tensor, Tensor, Tensor | None, int, bool], Tensor] | None
    """A stand-in for the chunked loss, in a trace."""
    computed: Tensor | None
    """The logits, once something has changed them or has got a view of them."""

    @staticmethod
    def __new__(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LossOptions) -> "Deferred":
        kind = hidden.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        made: Deferred = Tensor._make_wrapper_subclass(
            cls, (*hidden.shape[:-1], weight.shape[0]), dtype=cast or weight.dtype, device=hidden.device
        )
        made.hidden, made.weight, made.bias, made.options = hidden, weight, bias, options
        made.autocast, made.finish, made.loss, made.computed = cast, None, None, None
        return made

    def on(self, hidden: Tensor) -> "Deferred":
        """The same product of other hidden states."""
        other = Deferred(hidden, self.weight, self.bias, self.options)
        other.autocast, other.finish = self.autocast, self.finish
        return other

    def whole(self) -> Tensor:
        """The logits, as the head would have returned them, and as they were changed since."""
        if self.computed is not None:
            return self.computed
        kind = self.hidden.device.type
        with torch.autocast(kind, self.autocast, enabled=self.autocast is not None):
            logits = F.linear(self.hidden, self.weight, self.bias)
        return self.finish(logits) if self.finish else logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NOTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Deferred):
            if func == Tensor.requires_grad.__get__:  # type: ignore[attr-defined]
                return first.hidden.requires_grad
            if func == Tensor.register_hook and getattr(args[1], "__module__", "").startswith("torch."):
                return first.hidden.register_hook(args[1])  # FSDP2's, before the backward of what is computed from this
        return _read(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(isinstance(each, Deferred) and each.hidden.requires_grad for each in tree_leaves((args, kwargs))):
            raise WordsError(
                f"model: its logits go to code below torch's Python ({func}: a torch.autograd.Function, "
                "torch.jit.script), where logits in chunks have no gradient. Type objective.chunk=0."
            )
        args, kwargs = tree_map_only(Deferred, lambda each: each.whole(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    """Call `func` with logits in place of deferred ones, which keep them if they differ or may differ afterwards."""
    found: dict[int, tuple[Deferred, Tensor, int]] = {}

    def logits(each: Deferred) -> Tensor:
        if id(each) not in found:
            within = each.hidden
            with torch.inference_mode(within.is_inference()), torch.set_grad_enabled(within.requires_grad):
                whole = each.whole()
            found[id(each)] = each, whole, _version(whole)
        return found[id(each)][1]

    args, kwargs = tree_map_only(Deferred, logits, (args, kwargs))
    out = func(*args, **kwargs)
    for each, whole, version in found.values():
        if func in MARKS or _version(whole) != version or any(_shares(part, whole) for part in tree_leaves(out)):
            each.computed = whole
    return out


def _version(tensor: Tensor) -> int:
    """How often it was changed."""
    return -1 if tensor.is_inference() else tensor._version


def _shares(part: Any, whole: Tensor) -> bool:
    """Whether a part of a result may be in the memory of `whole`."""
    if part is None or isinstance(part, bool | int | float | str | torch.dtype | torch.device | torch.Size):
        return False
    if not isinstance(part, Tensor) or isinstance(part, DTensor) or isinstance(whole, DTensor):
        return True
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def settled(logits: Tensor) -> Tensor:
    """Logits that are computed, if they were not."""
    return logits.whole() if isinstance(logits, Deferred) else logits


def untouched(logits: Tensor) -> Tensor:
    """Logits, still deferred only if nothing has changed them or could have."""
    return logits.computed if isinstance(logits, Deferred) and logits.computed is not None else logits


def defer(model: nn.Module, chunk: int | str) -> None:
    """Let the head of `model`, if its vocabulary is large, defer its product where `deferring` asks for it. Changes the
    class of the layer.
    """
    head = _head_of(model)
    if head is not None and in_chunks(chunk, head.out_features):
        head.__class__ = Head


def is_compiled(model: nn.Module) -> bool:
    """Whether something in `model` is, and so its loss too."""
    return any(module._compiled_call_impl is not None for module in model.modules())


def _head_of(model: nn.Module) -> nn.Linear | None:
    """The layer that runs last by the model's table, or that transformers names, or else the widest, of several the
    last; None unless it is a plain linear layer outside of the blocks.
    """
    prefix, table = next(tables(model, "pipeline", "_pp_plan"), ("", ()))
    named = {f"{prefix}{name}" for name in table}
    last = next((module for name, module in reversed(list(model.named_modules())) if name in named), None)
    embeds = getattr(unwrapped(model), "get_output_embeddings", None)
    if type(last) is not nn.Linear and embeds is not None:
        last = embeds()
    inner = {module for block in blocks(model) for module in block.modules()}
    outside = [module for module in model.modules() if type(module) is nn.Linear and module not in inner]
    if not table and embeds is None:
        last = max(reversed(outside), key=lambda layer: layer.out_features, default=None)
    return last if type(last) is nn.Linear and last in outside else None


def local_parts(logits: Deferred) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden states, weight, bias) of this rank's part of the vocabulary, which get their gradients through these."""
    weight, bias, hidden = logits.weight, logits.bias, logits.hidden
    if isinstance(weight, DTensor):
        weight, bias = weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias
    if isinstance(hidden, DTensor):
        hidden = hidden.to_local(grad_placements=[Partial()])
    return hidden, weight, bias
