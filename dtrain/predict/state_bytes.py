"""Exact bytes of weights, gradients, optimizer state and averaged weights on the fullest rank, without torch.

The fullest rank is the first of every axis: a dim that does not divide evenly is split into pieces of ceil(size /
ranks), as in torch.chunk, and FSDP2 pads every piece to the size of the first
(https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtrain.config.facts import Part, fact
from dtrain.planned import Plan
from dtrain.predict.shapes import Block, Shapes, Types, Weight, types_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Holding:
    """How a strategy stores state. `shards`: weights, gradients and optimizer state are sharded; `frees`: gathered
    blocks are freed after their forward; `every`: gradients are reduced in every microbatch; `buckets`: gradients are
    in buckets from the start; `cpu`: state is offloaded to host memory.
    """

    shards: bool = False
    frees: bool = False
    every: bool = False
    buckets: bool = False
    cpu: bool = False


def holding_of(plan: Plan) -> Holding:
    part, mesh = plan.strategy, plan.mesh
    if fact(part, "holds") == "shards":
        frees = fact(part, "reshard") == "forward" and mesh.pp == 1
        return Holding(True, frees, fact(part, "reduce") == "every", cpu=fact(part, "offload") == "cpu")
    return Holding(buckets=bool(fact(part, "buckets")) and mesh.pp * mesh.tp * mesh.ep == 1)


def flowing(plan: Plan) -> Types:
    """The types between operators: FSDP2 gathers weights in the compute type, so embeddings and the residual stream
    have it too, and some models cast their embeddings to it.
    """
    types, casts = types_of(plan), fact(plan.model, "residual") == "compute"
    return replace(types, param=types.compute) if casts or holding_of(plan).shards else types


def gathered_bytes(plan: Plan) -> int:
    """Bytes per element of weights as a forward uses them, and of their gradients before reduction: FSDP2 casts weights
    when it gathers them.
    """
    return types_of(plan).compute if holding_of(plan).shards else types_of(plan).param


def shards_of(plan: Plan, weight: Weight) -> int:
    """Number of ranks over which the data axes shard a weight."""
    return _shards(plan)[weight.experts]


def _shards(plan: Plan) -> tuple[int, int]:
    """`shards_of` a dense weight, and one of experts."""
    if not holding_of(plan).shards:
        return 1, 1
    mesh = plan.mesh
    dense = mesh.dp_shard * mesh.cp
    return dense, mesh.batch // mesh.ep if mesh.ep > 1 else dense


def gathered(plan: Plan, weight: Weight) -> Shape:
    """The shape that one rank computes with, split by tp and ep only."""
    shape = list(weight.shape)
    if weight.experts:
        shape[0] //= plan.mesh.ep
    if weight.tp is not None:
        shape[weight.tp] = -(-shape[weight.tp] // plan.mesh.tp)
    return tuple(shape)


def piece(plan: Plan, weight: Weight) -> Shape:
    """The shape of the shard on the fullest rank."""
    return _cut(gathered(plan, weight), shards_of(plan, weight))


def _cut(shape: Shape, ranks: int) -> Shape:
    return (-(-shape[0] // ranks), *shape[1:]) if shape else ()


LIKE: Mapping[str, Callable[[Shape], Shape]] = {
    "whole": lambda shape: shape,
    "rows": lambda shape: (*shape[:-1], 1),
    "columns": lambda shape: (*shape[:-2], 1, shape[-1]),
}
"""Kind of optimizer state -> function from the shape of a parameter to that of the state. Another kind is `count`, a
scalar of four bytes.
"""


FITS: Mapping[str, Callable[[Weight, Shape], bool]] = {
    "hidden": lambda weight, shape: weight.hidden,
    "matrices": lambda weight, shape: len(shape) > 1,
    "every": lambda weight, shape: True,
}
"""Classes of parameters with the same optimizer state; the first that matches applies."""


def state_bytes(plan: Plan, weight: Weight, shape: Shape) -> int:
    """Bytes of optimizer state for a weight whose local shard has `shape`, from the fact `state` of the optimizer.
    `{whole: momentum}` exists only if the argument `momentum` is not 0.
    """
    return _optimizer_bytes(_kept(plan, weight, shape), types_of(plan).param, weight, shape)


def _kept(plan: Plan, weight: Weight, shape: Shape) -> list[str]:
    """Kinds of the optimizer state of a weight."""
    table: Mapping[str, Any] = fact(plan.optim, "state")
    entries = next(table[kind] for kind, fits in FITS.items() if kind in table and fits(weight, shape))
    return [name for entry in entries for name in _names(plan.optim, entry)]


def _optimizer_bytes(kept: Sequence[str], param: int, weight: Weight, shape: Shape) -> int:
    """`state_bytes`, of weights of `param` bytes."""
    if not weight.trained:
        return 0
    numbers = sum(math.prod(LIKE[name](shape)) for name in kept if name != "count")
    return numbers * param + 4 * kept.count("count")


def _names(optim: Part, entry: str | Mapping[str, str]) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [name for name, argument in entry.items() if optim.get(argument)]


@dataclass
class StateBytes:
    """Bytes on one rank."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    average: int = 0

    @property
    def all(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.average


def message(shapes: Shapes, blocks: Iterable[Block]) -> int:
    """Numbers in what a rank with these blocks tells the others about a step (dtrain/loop/agreement.py)."""
    return shapes.saved_buffers + sum(block.count * sum(weight.trained for weight in block.weights) for block in blocks)


def count_state(plan: Plan, blocks: Iterable[Block]) -> StateBytes:
    """Bytes of these blocks at the end of a step."""
    param, shards, total = types_of(plan).param, _shards(plan), StateBytes()
    known = dict[tuple[bool, bool], list[str]]()
    for block in blocks:
        for weight in block.weights:
            shape = _cut(gathered(plan, weight), shards[weight.experts])
            count = block.count * math.prod(shape)
            total.parameters += count * param if weight.bits is None else math.ceil(count * weight.bits / 8)
            total.gradients += count * param * weight.trained
            kind = weight.hidden, len(shape) > 1
            known[kind] = known.get(kind) or _kept(plan, weight, shape)
            total.optimizer += block.count * _optimizer_bytes(known[kind], param, weight, shape)
            total.average += 4 * count * weight.trained * (plan.ema is not None)
    return total


def saved(plan: Plan, shapes: Shapes) -> int:
    """Bytes of the tensors in one checkpoint, summed over the files of all ranks, without file headers."""
    types, ema, total = types_of(plan), plan.ema is not None, shapes.saved
    has_base = fact(plan.adapter, "trains") == "adapter"  # of which a checkpoint holds the name alone
    for block in shapes.blocks:
        for weight in block.weights:
            state = state_bytes(plan, weight, weight.shape)
            held = types.param * (weight.trained or not has_base)
            total += block.count * (weight.count * (held + 4 * ema * weight.trained) + state)
    return total
