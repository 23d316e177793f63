"""Records memory and operations of a forward and backward, for each part of a model. See them with `dtrain plan`
for your own model.

Autograd's saved-tensor hooks show what is kept; the formulas of torch.utils.flop_counter count operations.
"""

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dtrain.predict.shapes import Attention, Kept, Split
from dtrain.remat.selective import KEPT

NOTHING = dict.fromkeys(("whole", "stream", "inside", "logits"), 0)
ATTENTION = "scaled_dot_product"
"""Part of the names of torch's fused attentions."""
BINCOUNT = torch.ops.aten.bincount.default
WAYS = ("all", "products", "inputs", "taken", "given", "deferred_wgrad", "ends")


@dataclass
class Part:
    """A block (`listed`), or what runs before, between or after blocks. Sizes are bytes by the layout that tensor
    parallelism gives them.
    """

    name: str
    listed: bool
    kept: dict[str, dict[str, float]] = field(default_factory=lambda: {way: dict(NOTHING) for way in WAYS})
    peak_live: float = 0
    work: int = 0
    backward_work: int = 0
    attention_work: int = 0
    tail: int = 0
    spared: int = 0
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


def _confusion(numbers: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """torch.bincount without values, which objectives use for a confusion matrix; assumes a result of `minlength`."""
    return numbers.new_empty(minlength, dtype=torch.int64) if minlength else BINCOUNT(numbers, weights)


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
        self._taken: set[int] = set()
        self._last = 0, 0, "stream"
        self._before: dict[int, float] = {}
        self.returns, self.tables = Kept(), 0
        """`tables`: bytes that several parts share and that get no gradient, such as rotations and masks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = (
            _confusion(*args, **(kwargs or {}))
            if func is BINCOUNT and isinstance(args[0], FakeTensor)
            else func(*args, **(kwargs or {}))
        )
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        for each in made:
            self._meet(each, taken, copy="_to_copy" in func.__name__)
        if func in KEPT and not self.backward:
            for each in made:
                self._products[storage(each)] = self.part
                self._add("products", each)
        if (
            not self.backward
            and made
            and storage(made[0]) not in self._trained
            and any(storage(each) in self._trained for each in taken)
        ):
            self._turn(made[0])
        self._count(func, args, kwargs or {}, out)
        return out

    def _turn(self, tensor: Tensor) -> None:
        """An operator uses a weight; the gradient of the weight needs that of `tensor` and everything saved so far."""
        self._add("deferred_wgrad", tensor)
        self._deferred_wgrad[storage(tensor)] = self.part
        self.part.kept["ends"] = dict(NOTHING)
        self._last = tensor.numel(), nbytes(tensor), self._how(tensor)

    def mark(self, tensor: Any, layout: str) -> None:
        """Set the layout of tensors, also in what was recorded before the layout was known."""
        for each in tree_leaves(tensor):
            if isinstance(each, Tensor):
                for way, parts in (("products", self._products), ("deferred_wgrad", self._deferred_wgrad)):
                    if storage(each) in parts:
                        parts[storage(each)].kept[way][self._how(each)] -= nbytes(each)
                        parts[storage(each)].kept[way][layout] += nbytes(each)
                self._layouts[storage(each)] = layout

    def pack(self, tensor: Tensor) -> Saved:
        key, self.part.tail = storage(tensor), 0
        first = self._keepers.get(key)
        if key not in self._known and first is None:
            self._keepers[key] = self.part
            if key in self._taken:
                self._add("taken", tensor)
            self._add("all", tensor)
            self._add("ends", tensor)
        elif first not in (None, self.part) and key not in self._passed and key not in self._known:
            assert first
            first.kept["all"][self._how(tensor)] -= nbytes(tensor)
            self.tables += nbytes(tensor)
            self._known.add(key)
        return Saved(tensor, self.part)

    def unpack(self, saved: Saved) -> Tensor:
        self.part = saved.part
        return saved.tensor

    def enter(self, part: Part, inputs: Any) -> None:
        self.part, self._taken = part, set()
        part.uses += 1
        self.parts.append(part)
        handed = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
        # no input of the first block may require a gradient
        for each in [each for each in handed if each.requires_grad] or handed[:1]:
            if storage(each) not in self._known:
                self._passed.add(storage(each))
                self._taken.add(storage(each))
                self._add("inputs", each)
                self._add("products", each)

    def leave(self, part: Part, out: Any) -> None:
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        part.passes, part.grad_out = (
            sum(each.numel() for each in made),
            part.grad_out or any(each.requires_grad for each in made),
        )
        if not part.grad_out:  # there is no backward, so nothing is recomputed
            part.kept |= {way: dict(NOTHING) for way in WAYS if way != "all"}
        if (
            made and self._last[:2] == (made[0].numel(), nbytes(made[0])) and not any(part.kept["ends"].values())
        ):  # its gradient is the gradient of `out`
            part.kept["ends"][self._last[2]] += self._last[1]
        for each in made:
            if self._keepers.get(storage(each)) is part:
                part.kept["given"][self._how(each)] += nbytes(each)
        if part.splits and part.tail:
            part.splits[-1] = replace(part.splits[-1], recompute=False)
        part.spared, part.tail = part.spared + part.tail, 0
        self.part = Part("", False)
        self.parts.append(self.part)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.ndim == 4:
            wide = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
            self.part.attention.append(
                Attention(
                    query.shape[1], key.shape[1], query.shape[3], value.shape[3], query.shape[2], wide.itemsize,
                    self._how(query) == "inside", any(each.requires_grad for each in (query, key, value)),
                )
            )  # fmt: skip

    def reach(self, name: str) -> None:
        """A module with its own weights begins."""
        self.reached.setdefault(name, len(self.parts))

    def turn(self) -> None:
        """The backward begins."""
        self.backward = True
        sizes: dict[int, float] = {}
        for part in self.parts:
            sizes[id(part)] = 0.0
            self._before[id(part)] = sum(sizes.values())
            sizes[id(part)] = sum(part.kept["all"].values())

    def settle(self, weight: Tensor) -> None:
        """The gradient of `weight` is complete: it no longer counts as an activation."""
        if weight.grad is not None and storage(weight.grad) not in self._known:
            self._known.add(storage(weight.grad))
            self.alive -= nbytes(weight.grad)

    def _how(self, tensor: Tensor) -> str:
        return self._layouts.get(storage(tensor), "stream")

    def _add(self, way: str, tensor: Tensor) -> None:
        self.part.kept[way][self._how(tensor)] += nbytes(tensor)

    def _meet(self, tensor: Tensor, taken: list[Tensor], *, copy: bool) -> None:
        key = storage(tensor)
        if key in self._known or key in self._layouts:
            return
        if copy and storage(taken[0]) in self._weights:  # autocast's copies of weights are counted with the weights
            self._known.add(key)
            self._trained |= {key} if storage(taken[0]) in self._trained else set()
            return
        layouts = [self._how(each) for each in taken if storage(each) not in self._known]
        self._layouts[key] = next(
            (layout for layout in ("logits", "inside", "stream") if layout in layouts), "whole" if layouts else "stream"
        )
        size = nbytes(tensor)
        self.alive += size
        weakref.finalize(tensor.untyped_storage(), self._gone, key, size)
        if self.backward:
            self.part.peak_live = max(self.part.peak_live, self.alive - self._before[id(self.part)])

    def _gone(self, key: int, size: int) -> None:
        """Forget a freed storage: another one may get its address."""
        self.alive -= size * (key not in self._known)
        self._known.discard(key)
        for notes in (self._layouts, self._keepers, self._products, self._deferred_wgrad):
            notes.pop(key, None)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        formula = flop_registry.get(func.overloadpacket)
        if formula is None and ATTENTION in func.__name__ and not self.backward:
            query, key = args[:2]
            self.part.attention_work += 2 * query.shape[1] * query.shape[2] * key.shape[2] * query.shape[3]
        elif formula is not None:
            count = formula(*args, **kwargs, out_val=out) // 2
            is_attention = ATTENTION in func.__name__
            self.part.attention_work += count * (is_attention and not self.backward)
            self.part.work += count * (not is_attention and not self.backward)
            if not self.backward:
                self.part.tail = 0 if is_attention else count
            self.part.backward_work += count * (not is_attention and self.backward)


class Listener(TorchFunctionMode):
    """Records every call of attention, under any of its names."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self._watch.attend(
                *args[:3],
                **{name: value for name, value in (kwargs or {}).items() if name in ("query", "key", "value")},
            )
        return func(*args, **(kwargs or {}))


def storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
