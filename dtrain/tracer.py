"""The shapes of a model that is built and run once on tensors without memory: what it holds, keeps and computes, block by block.

    dtrain plan model._target_=mypkg.Model trust=[mypkg] data=...

One sample goes forward and backward under FakeTensorMode (https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html): no process
group, no GPU, no memory for weights. What is kept is seen by autograd's own hooks, what is computed by the formulas of
torch.utils.flop_counter. The operators are those of the CPU, also for a run on a GPU, whose norms keep less. Where a forward looks into
numbers, which are not there, the weights are known and the rest is not.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from dtrain.build import build
from dtrain.data.stream import as_source
from dtrain.errors import DtrainError, first_line
from dtrain.model import blocks, construct
from dtrain.model.moe import Experts
from dtrain.optim.muon import hidden_matrices
from dtrain.parallel.order import lower, materialize
from dtrain.parallel.tensor import matches, plan_of
from dtrain.plan import Plan
from dtrain.predict.held import flowing
from dtrain.predict.shapes import Block, Kept, Shapes, Split, Weight, runs, types_of
from dtrain.predict.tape import DIM, HELD
from dtrain.remat.selective import KEPT
from dtrain.seeds import fill
from dtrain.step import call

NOTHING = dict.fromkeys(("whole", "stream", "inside", "logits"), 0)
ATTENTION = "scaled_dot_product"
"""What is in the names of torch's fused attentions."""


@dataclass
class Part:
    """A block, or what runs before the first (`listed` False) or behind the last. Sizes are bytes, by how tensor parallelism holds them."""

    name: str
    listed: bool
    kept: dict[str, dict[str, float]] = field(default_factory=lambda: {way: dict(NOTHING) for way in ("all", "products", "inputs", "turned")})
    busy: float = 0
    work: int = 0
    back: int = 0
    looks: int = 0
    tail: int = 0
    passes: int = 0
    splits: list[Split] = field(default_factory=list)


@dataclass(frozen=True)
class Saved:
    """A tensor that waits for the backward of a part."""

    tensor: Tensor
    part: Part


class Watch(TorchDispatchMode):
    """Notes of every operator what it makes and computes, and for which part. A storage is `held` as what it was made of."""

    def __init__(self, model: nn.Module, samples: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts = [Part("", False)]
        self.part, self.backward, self.alive = self.parts[0], False, 0
        self._weights = {storage(each) for each in (*model.parameters(), *model.buffers())}
        self._known = self._weights | {storage(each) for each in samples}
        self._held: dict[int, str] = {}
        self.reached: dict[str, int] = {}
        self._noted: dict[int, Part] = {}
        self._products: dict[int, Part] = {}
        self._passed: set[int] = set()
        self._before: dict[int, float] = {}
        self.tables = 0
        """Bytes that several parts keep, and no gradient flows to: rotations, masks."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        taken = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        for each in made:
            self._meet(each, taken, copy="_to_copy" in func.__name__)
        if func in KEPT and not self.backward:
            for each in made:
                self._products[storage(each)] = self.part
                self._add("products", each)
                if ATTENTION not in func.__name__:
                    self._add("turned", each)
        self._count(func, args, kwargs or {}, out)
        return out

    def mark(self, tensor: Any, held: str) -> None:
        """Also of what was noted before its module said how it is held."""
        for each in tree_leaves(tensor):
            if isinstance(each, Tensor):
                if storage(each) in self._products:
                    part = self._products[storage(each)]
                    part.kept["products"][self._how(each)] -= nbytes(each)
                    part.kept["products"][held] += nbytes(each)
                self._held[storage(each)] = held

    def pack(self, tensor: Tensor) -> Saved:
        key, self.part.tail = storage(tensor), 0
        first = self._noted.get(key)
        if key not in self._known and first is None:
            self._noted[key] = self.part
            self._add("all", tensor)
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
        self.part = part
        self.parts.append(part)
        for each in tree_leaves(inputs):
            if isinstance(each, Tensor) and each.requires_grad:
                self._passed.add(storage(each))
                self._add("inputs", each)
                self._add("products", each)

    def leave(self, part: Part, out: Any) -> None:
        part.passes = sum(each.numel() for each in tree_leaves(out) if isinstance(each, Tensor))
        self.part = Part("", False)
        self.parts.append(self.part)

    def reach(self, name: str) -> None:
        """A module with weights of its own begins."""
        self.reached.setdefault(name, len(self.parts))

    def turn(self) -> None:
        """The backward begins."""
        self.backward, before = True, 0.0
        for part in self.parts:
            self._before[id(part)] = before
            before += sum(part.kept["all"].values())

    def settle(self, weight: Tensor) -> None:
        """Its gradient is there: no longer a matter of activations."""
        if weight.grad is not None and storage(weight.grad) not in self._known:
            self._known.add(storage(weight.grad))
            self.alive -= nbytes(weight.grad)

    def _how(self, tensor: Tensor) -> str:
        return self._held.get(storage(tensor), "stream")

    def _add(self, way: str, tensor: Tensor) -> None:
        self.part.kept[way][self._how(tensor)] += nbytes(tensor)

    def _meet(self, tensor: Tensor, taken: list[Tensor], *, copy: bool) -> None:
        key = storage(tensor)
        if key in self._known or key in self._held:
            return
        if copy and storage(taken[0]) in self._weights:  # autocast's copies of weights are counted with the weights
            self._known.add(key)
            return
        found = [self._how(each) for each in taken if storage(each) not in self._known]
        self._held[key] = next((held for held in ("logits", "inside", "stream") if held in found), "whole" if found else "stream")
        size = nbytes(tensor)
        self.alive += size
        weakref.finalize(tensor.untyped_storage(), self._gone, key, size)
        if self.backward:
            self.part.busy = max(self.part.busy, self.alive - self._before[id(self.part)])

    def _gone(self, key: int, size: int) -> None:
        """Another storage may come to lie there."""
        self.alive -= size * (key not in self._known)
        self._known.discard(key)
        for notes in (self._held, self._noted, self._products):
            notes.pop(key, None)

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        formula = flop_registry.get(func.overloadpacket)
        if formula is None and ATTENTION in func.__name__ and not self.backward:
            query, key = args[:2]
            self.part.looks += 2 * query.shape[1] * query.shape[2] * key.shape[2] * query.shape[3]
        elif formula is not None:
            count = formula(*args, **kwargs, out_val=out) // 2
            looks = ATTENTION in func.__name__
            self.part.looks += count * (looks and not self.backward)
            self.part.work += count * (not looks and not self.backward)
            self.part.tail = self.part.tail if self.backward else 0 if looks else count
            self.part.back += count * (not looks and self.backward)


def storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def trace(plan: Plan, *, real: bool = False) -> Shapes:
    """`real`: on tensors with memory, for a small model that looks into its numbers. Raises WordsError as building the model would."""
    source, objective, precision = as_source(build(plan.data)), build(plan.objective), build(plan.precision)
    one, facts = source.take(np.array([0]), np.array([0])), source.facts  # with real numbers: data may look at them
    fake = None if real else FakeTensorMode(allow_non_fake_inputs=True)
    with fake or nullcontext():
        model = construct(plan.model, facts=facts, seed=0)
        if any(each.is_meta for each in model.parameters()):
            materialize(model, torch.device("cpu"))  # under the fake mode this takes no memory
            if real:
                fill(model, plan.seed)
        if precision.param != torch.float32:
            lower(model, precision.param)
        if flowing(plan).param != types_of(plan).param:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(precision.compute)
        batch = tree_map_only(Tensor, lambda each: fake.from_tensor(each) if fake else each, one)
        samples = [each for each in tree_leaves(batch) if isinstance(each, Tensor)]
        watch, unknown = Watch(model, samples), ""
        listed = list(dict.fromkeys(blocks(model)))
        try:
            with _listening(model, listed, watch), watch, saved_tensors_hooks(watch.pack, watch.unpack):
                with precision.autocast(torch.device("cpu")):
                    loss = objective.loss(call(model, objective.inputs(batch)), batch).sum
                watch.turn()
                loss.backward()
        except DtrainError:
            raise
        except Exception as error:  # whatever the user's forward does with numbers that are not there
            unknown, watch = f"{type(error).__name__}: {first_line(error)}", Watch(model, samples)
    sequence = plan.data.get("sequence")
    return Shapes(
        runs(_blocks(model, listed, watch, known=not unknown)), sum(each.nbytes for each in model.buffers()), _persistent(model), watch.tables,
        sum(each.nbytes for each in samples), sequence if isinstance(sequence, int) else 1, unknown,
    )  # fmt: skip


@contextmanager
def _listening(model: nn.Module, listed: list[nn.Module], watch: Watch) -> Iterator[None]:
    """Blocks say when they begin and end, modules that tensor parallelism splits how their outputs are held."""
    names, hooks = {id(module): name for name, module in model.named_modules()}, list[Any]()
    for module in listed:
        part = Part(names[id(module)], True)
        hooks.append(module.register_forward_pre_hook(lambda _, args, kwargs, part=part: watch.enter(part, (args, kwargs)), with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda _, args, out, part=part: watch.leave(part, out)))
    for module in model.modules():
        style = _style(model, names[id(module)])
        if style in HELD:
            hooks.append(module.register_forward_hook(_split(watch, names[id(module)], style)))
        if any(True for _ in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(_reaching(watch, names[id(module)])))
    for parameter in model.parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(watch.settle))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _reaching(watch: Watch, name: str) -> Callable[..., None]:
    return lambda module, args: watch.reach(name)


def _split(watch: Watch, name: str, style: str) -> Callable[..., None]:
    def after(module: nn.Module, args: Any, out: Any) -> None:
        sizes = [sum(each.numel() for each in tree_leaves(tree) if isinstance(each, Tensor)) for tree in (args, out)]
        watch.part.splits.append(Split(name, style, *sizes))
        watch.mark(out, HELD[style])

    return after


def _style(model: nn.Module, name: str) -> str:
    return next((style for pattern, style in plan_of(model).items() if matches(name, pattern)), "")


def _blocks(model: nn.Module, listed: list[nn.Module], watch: Watch, *, known: bool) -> list[Block]:
    """What runs before the first block, the blocks in the order they ran, what runs behind them."""
    names = {id(module): name for name, module in model.named_modules()}
    mine = {names[id(module)]: _weights(model, module, names[id(module)]) for module in listed}
    inside = {weight.name for weights in mine.values() for weight in weights}
    root = [weight for weight in _weights(model, model, "") if weight.name not in inside]
    first = {name for name, place in watch.reached.items() if place == 1} if known else {""}
    before = [weight for weight in root if (weight.name.rpartition(".")[0] in first if known else weight.embedding)]
    parts = {part.name: part for part in watch.parts if part.listed}
    order = [name for name in parts if name in mine] + [name for name in mine if name not in parts]
    start, *rest = (part for part in watch.parts if not part.listed)
    end = Part("behind", False)
    for part in rest:
        _join(end, part)
    behind = [weight for weight in root if weight not in before]
    ends = (_block(start, "before", before), _block(end, "behind", behind))
    return [ends[0], *(_block(parts.get(name, Part(name, True)), name, mine[name]) for name in order), ends[1]]


def _join(end: Part, part: Part) -> None:
    for way, sizes in part.kept.items():
        for held, size in sizes.items():
            end.kept[way][held] += size
    end.busy = max(end.busy, part.busy)
    end.work, end.back, end.looks = end.work + part.work, end.back + part.back, end.looks + part.looks
    end.splits += part.splits


def _block(part: Part, name: str, weights: list[Weight]) -> Block:
    kept = {way: Kept(**sizes) for way, sizes in part.kept.items()}
    more = max(0.0, part.busy - sum(part.kept["all"].values()))
    return Block(
        name,
        1,
        part.listed,
        tuple(weights),
        kept,
        kept["all"] + Kept(inside=more),
        part.work,
        part.back,
        part.looks,
        part.work + part.looks - part.tail,
        part.passes,
        tuple(part.splits),
    )


def _weights(model: nn.Module, module: nn.Module, prefix: str) -> list[Weight]:
    """Each once, as `parameters` gives them."""
    owners: dict[int, list[nn.Module]] = {}
    for each in model.modules():
        for parameter in each.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(each)
    turned, found = {id(parameter) for parameter in hidden_matrices(model)}, []
    for name, parameter in module.named_parameters():
        whole = f"{prefix}.{name}" if prefix else name
        kinds = [isinstance(each, nn.Embedding) for each in owners[id(parameter)]]
        multiplied = parameter.ndim > 1 or any(isinstance(each, nn.Linear | nn.modules.conv._ConvNd) for each in owners[id(parameter)])
        dim = DIM.get(_style(model, whole.rpartition(".")[0]))
        split = dim if parameter.ndim > 1 else (0 if dim == 0 else None)
        found.append(
            Weight(
                whole, tuple(parameter.shape), split, isinstance(owners[id(parameter)][0], Experts), multiplied and not all(kinds),
                id(parameter) in turned, any(kinds), parameter.requires_grad,
            )
        )  # fmt: skip
    return found


def _persistent(model: nn.Module) -> int:
    """Bytes of the buffers that a checkpoint holds."""
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return sum(value.nbytes for name, value in model.state_dict().items() if name not in weights and isinstance(value, Tensor))
