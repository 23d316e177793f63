"""Records memory and operations of a forward and backward, for each part of a model. See them with `dtrain plan`
for your own model.

Autograd's saved-tensor hooks show what is kept; the formulas of torch.utils.flop_counter count operations.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtrain.objective.head import Deferred
from dtrain.predict.shapes import Attention, Chunk, LayoutBytes, Split
from dtrain.remat.selective import KEPT
from dtrain.tracing.operations import multiplications
from dtrain.tracing.stand_ins import STAND_INS, FusedNorm, HeadLoss, normalized
from dtrain.tracing.tensors import nbytes, storage, tensors_of, weight_edges

NOTHING = dict.fromkeys(("whole", "stream", "inside", "logits"), 0)
ATTENTION = "scaled_dot_product"
"""Part of the names of torch's fused attentions."""
DEVICE = torch.ops.prim.device.default
BATCH_NORM = torch.ops.aten.native_batch_norm.default
OF_EMBEDDING = torch.ops.aten.embedding_dense_backward.default
HEADS = ("colwise_gather_output", "colwise_rep")
WAYS = ("all", "products", "inputs", "saved_input", "saved_output", "deferred_wgrad", "ends", "transient")


@dataclass
class Part:
    """A block (`listed`), or what runs before, between or after blocks. Sizes are bytes by the layout that tensor
    parallelism gives them.
    """

    name: str
    listed: bool
    saved: dict[str, dict[str, float]] = field(default_factory=lambda: {way: dict(NOTHING) for way in WAYS})
    work: int = 0
    backward_work: int = 0
    attention_work: int = 0
    tail: int = 0
    spared: int = 0
    widened: int = 0
    passes: int = 0
    splits: list[Split] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    uses: int = 0
    grad_out: bool = False


@dataclass(frozen=True)
class Saved:
    """A tensor saved for the backward of a part."""

    tensor: Tensor
    part: Part


@dataclass
class Moment:
    """Bytes alive when memory came into being in the backward of a part: of activations and their gradients (`live`),
    of complete gradients of weights (`made`), and of others of weights (`coming`).
    """

    part: Part
    live: float
    made: float
    coming: float


class Watch(TorchDispatchMode):
    """Records for every operator, by part, its results and operations. A storage inherits the layout of its inputs."""

    def __init__(self, model: nn.Module, samples: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts = [Part("", False)]
        self.part, self.backward, self.alive = self.parts[0], False, 0
        self._weights = {storage(each) for each in (*model.parameters(), *model.buffers())}
        self._trained = {storage(each) for each in model.parameters() if each.requires_grad}
        self._known = self._weights | {storage(each) for each in samples}
        self._layouts: dict[int, str] = {}
        self.reached: dict[str, int] = {}
        self._keepers: dict[int, Part] = {}
        self._products: dict[int, Part] = {}
        self._deferred_wgrad: dict[int, Part] = {}
        self._passed: set[int] = set()
        self._inputs: set[int] = set()
        self._last = 0, 0, "stream"
        self.moments: list[Moment] = []
        self._made = self._coming = 0
        self._gradients: dict[int, bool] = {}
        self._born: dict[int, int] = {}
        self.chunk: Chunk | None = None
        self.returns, self.tables = LayoutBytes(), 0
        """`tables`: bytes that several parts share and that get no gradient, such as rotations and masks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):  # two of three calls
            return args[0].device
        act = STAND_INS.get(func, func) if args and isinstance(args[0], FakeTensor) else func
        out = act(*args, **(kwargs or {}))
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(out)
        for each in outputs:
            self._meet(each, inputs, copy="_to_copy" in func.__name__)
        if func is OF_EMBEDDING:
            self._set_apart(outputs[0])
        if func is BATCH_NORM:
            self._share(outputs[1:])
        self._count(func, args, kwargs or {}, out)
        if self.backward or not outputs:
            return out
        if func in KEPT:
            for each in outputs:
                self._products[storage(each)] = self.part
                self._add("products", each)
        if storage(outputs[0]) not in self._trained and any(storage(each) in self._trained for each in inputs):
            self.use_weight(outputs[0])
        return out

    def _share(self, statistics: list[Tensor]) -> None:
        """Statistics of a batch, which are as large for any number of samples."""
        for each in statistics:
            self._known.add(storage(each))
            self.alive -= nbytes(each)
            self.tables += nbytes(each)

    def chunked(self, logits: Deferred) -> None:
        """A head whose loss computes its logits a chunk at a time, in place of which a stand-in runs here: it leaves
        what such a loss keeps of a sample, and no logits.
        """
        logits.loss = partial(self._loss, logits.dtype)
        split = any(each.style in HEADS for each in self.part.splits)
        self.chunk = Chunk(
            rows=logits.options.chunk,
            tokens=logits.hidden.shape[:-1].numel(),
            vocabulary=len(logits.weight),
            bytes=logits.dtype.itemsize,
            numbers=logits.weight.numel(),
            split=split,
            trained=logits.weight.requires_grad,
        )

    def _loss(
        self, product: torch.dtype, hidden: Tensor, weight: Tensor, bias: Tensor | None, count: int, again: bool
    ) -> Tensor:
        work = hidden.shape[:-1].numel() * weight.numel()
        self.part.work += work
        self.part.backward_work += (1 + weight.requires_grad + again) * work
        given = hidden, weight, bias, count, product, self.expect
        loss: Tensor = HeadLoss.apply(*given)  # type: ignore[no-untyped-call]
        return loss

    def expect(self, weight: Tensor) -> Tensor:
        """A gradient for a weight, which counts as none of the activations."""
        gradient = torch.zeros_like(weight)
        self._set_apart(gradient)
        return gradient

    def use_weight(self, tensor: Tensor) -> None:
        """An operator uses a weight; the gradient of the weight needs that of `tensor` and everything saved so far."""
        self._add("deferred_wgrad", tensor)
        self._deferred_wgrad[storage(tensor)] = self.part
        self.part.saved["ends"] = dict(NOTHING)
        self._last = tensor.numel(), nbytes(tensor), self._how(tensor)

    def mark(self, tensor: Any, layout: str) -> None:
        """Set the layout of tensors, also in what was recorded before the layout was known."""
        for each in tensors_of(tensor):
            for way, parts in (("products", self._products), ("deferred_wgrad", self._deferred_wgrad)):
                if storage(each) in parts:
                    parts[storage(each)].saved[way][self._how(each)] -= nbytes(each)
                    parts[storage(each)].saved[way][layout] += nbytes(each)
            self._layouts[storage(each)] = layout

    def pack(self, tensor: Tensor) -> Saved:
        key, self.part.tail = storage(tensor), 0
        first = self._keepers.get(key)
        if key not in self._known and first is None:
            self._keepers[key] = self.part
            if key in self._inputs:
                self._add("saved_input", tensor)
            self._add("all", tensor)
            self._add("ends", tensor)
        elif first not in (None, self.part) and key not in self._passed and key not in self._known:
            assert first
            first.saved["all"][self._how(tensor)] -= nbytes(tensor)
            self.tables += nbytes(tensor)
            self._known.add(key)
        return Saved(tensor, self.part)

    def unpack(self, saved: Saved) -> Tensor:
        self.part = saved.part
        return saved.tensor

    def enter(self, part: Part, _module: nn.Module, *inputs: Any) -> None:
        """A forward pre-hook: the block of this part begins."""
        self.part, self._inputs = part, set()
        part.uses += 1
        self.parts.append(part)
        handed = tensors_of(inputs)
        # no input of the first block may require a gradient
        for each in [each for each in handed if each.requires_grad] or handed[:1]:
            if storage(each) not in self._known:
                self._passed.add(storage(each))
                self._inputs.add(storage(each))
                self._add("inputs", each)
                self._add("products", each)

    def leave(self, part: Part, _module: nn.Module, _args: Any, out: Any) -> None:
        """A forward hook: the block of this part ends."""
        outputs = tensors_of(out)
        part.passes = sum(each.numel() for each in outputs)
        part.grad_out = part.grad_out or any(each.requires_grad for each in outputs)
        if not part.grad_out:  # there is no backward, so nothing is recomputed
            part.saved |= {way: dict(NOTHING) for way in WAYS if way != "all"}
        is_last = outputs and self._last[:2] == (outputs[0].numel(), nbytes(outputs[0]))
        if is_last and not any(part.saved["ends"].values()):  # its gradient is the gradient of `out`
            part.saved["ends"][self._last[2]] += self._last[1]
        for each in outputs:
            if self._keepers.get(storage(each)) is part:
                part.saved["saved_output"][self._how(each)] += nbytes(each)
        if part.splits and part.tail:
            part.splits[-1] = replace(part.splits[-1], recompute=False)
        part.spared, part.tail = part.spared + part.tail, 0
        self.part = Part("", False)
        self.parts.append(self.part)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.ndim == 4:
            split = self._how(query) == "inside"
            self.part.attention.append(attention_of(query, key, value, split=split))

    def reach(self, name: str, *_: Any) -> None:
        """A forward pre-hook: a module with its own weights begins."""
        self.reached.setdefault(name, len(self.parts))

    def begin_backward(self, loss: Tensor) -> None:
        self.backward = True
        for node, places in weight_edges(loss.grad_fn, self._trained):
            node.register_hook(partial(self._reached, places))

    def settle(self, weight: Tensor) -> None:
        """The gradient of `weight` is complete."""
        if weight.grad is not None:
            self._set_apart(weight.grad)
            if not self._gradients.get(storage(weight.grad), True):
                self._gradients[storage(weight.grad)] = True
                self._made += nbytes(weight.grad)
                self._coming -= nbytes(weight.grad)

    def _reached(self, places: Sequence[int], gradients: Sequence[Tensor | None], _: Any) -> None:
        """A node of the graph has its gradients, of which those at `places` are of weights alone."""
        others = {storage(each) for index, each in enumerate(gradients) if each is not None and index not in places}
        for each in (gradients[index] for index in places):
            if each is not None and storage(each) not in others:
                self._set_apart(each)

    def _set_apart(self, gradient: Tensor) -> None:
        """A gradient of a weight: it counts as no activation, from the moment on at which its memory came."""
        key, size = storage(gradient), nbytes(gradient)
        if key not in self._known:
            self._known.add(key)
            self._gradients[key] = False
            self.alive -= size
            self._coming += size
            for moment in self.moments[self._born.get(key, len(self.moments)) :]:
                moment.live -= size
                moment.coming += size

    def _how(self, tensor: Tensor) -> str:
        return self._layouts.get(storage(tensor), "stream")

    def _add(self, way: str, tensor: Tensor) -> None:
        self.part.saved[way][self._how(tensor)] += nbytes(tensor)

    def _meet(self, tensor: Tensor, inputs: list[Tensor], *, copy: bool) -> None:
        """Note a new tensor, the result of an operator on `inputs`."""
        key = storage(tensor)
        if key in self._known or key in self._layouts:
            return
        if copy and storage(inputs[0]) in self._weights:  # autocast's copies of weights are counted with the weights
            self._known.add(key)
            self.part.widened += nbytes(tensor) * (tensor.itemsize > inputs[0].itemsize and not self.backward)
            self._trained |= {key} if storage(inputs[0]) in self._trained else set()
            weakref.finalize(tensor.untyped_storage(), self._gone, key, 0)
            return
        layouts = {self._how(each) for each in inputs if storage(each) not in self._known} or {"stream"}
        self._layouts[key] = next(layout for layout in ("logits", "inside", "stream", "whole") if layout in layouts)
        size = nbytes(tensor)
        self.alive += size
        weakref.finalize(tensor.untyped_storage(), self._gone, key, size)
        if self.backward:
            self._born[key] = len(self.moments)
            self.moments.append(Moment(self.part, self.alive, self._made, self._coming))

    def _gone(self, key: int, size: int) -> None:
        """Forget a freed storage: another one may get its address."""
        self.alive -= size * (key not in self._known)
        self._coming -= size * (not self._gradients.pop(key, True))
        for names in (self._known, self._trained, self._passed):
            names.discard(key)
        for notes in (self._layouts, self._keepers, self._products, self._deferred_wgrad, self._born):
            notes.pop(key, None)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        formula, is_attention = multiplications(func.overloadpacket), ATTENTION in func.__name__
        count = formula(*args, **kwargs, out_val=out) if formula else 0
        if is_attention and formula is None and not self.backward:
            query, key = args[:2]
            self.part.attention_work += 2 * query.shape[1] * query.shape[2] * key.shape[2] * query.shape[3]
        elif is_attention and not self.backward:
            self.part.attention_work += count
            self.part.tail = 0
        elif self.backward:
            self.part.backward_work += count * (not is_attention)
        elif formula:
            self.part.work += count
            self.part.tail = count


class Listener(TorchFunctionMode):
    """Records every call of attention, under any of its names, and lets one sample through batch norms. `fused`: an RMS
    norm is one operator, as on a GPU.
    """

    def __init__(self, watch: Watch, *, fused: bool = False) -> None:
        super().__init__()
        self._watch, self._fused = watch, fused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            named = {name: value for name, value in (kwargs or {}).items() if name in ("query", "key", "value")}
            self._watch.attend(*args[:3], **named)
        if func is F.batch_norm:
            return normalized(*args, **(kwargs or {}))
        if func is F.rms_norm and self._fused:
            return self._norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _norm(self, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        rows = x.shape[: x.ndim - len(shape)]
        out: Tensor = FusedNorm.apply(x, weight, rows, self._watch.expect)  # type: ignore[no-untyped-call]
        if weight is not None and weight.requires_grad:
            self._watch.use_weight(out)
        return out


def attention_of(query: Tensor, key: Tensor, value: Tensor, *, split: bool) -> Attention:
    """The attention of one sample, in the type that autocast gives it."""
    wide = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    return Attention(
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head=query.shape[3],
        value=value.shape[3],
        tokens=query.shape[2],
        bytes=wide.itemsize,
        split=split,
        grad_out=any(each.requires_grad for each in (query, key, value)),
    )
