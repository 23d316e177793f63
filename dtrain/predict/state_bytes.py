"""Bytes on the fullest rank of the weights, their gradients, the optimizer's state and the average: exact bytes. No
torch.

The fullest rank is the first of every axis: a dim that does not divide is cut into pieces of ceil(size / ranks), as
torch.chunk does, and FSDP2 fills every piece up to the first one's size
(https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from dtrain.planned import Part
from dtrain.predict.shapes import Block, Decided, Shapes, Types, Weight, types_of, word_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Holding:
    """How a strategy holds state. `shards` of weights, gradients and optimizer; `frees` gathered blocks after their
    forward; reduces gradients in `every` microbatch; `buckets`: gradients live in buckets from the beginning; `cpu`:
    state rests in the memory of the host.
    """

    shards: bool = False
    frees: bool = False
    every: bool = False
    buckets: bool = False
    cpu: bool = False


def holding_of(plan: Decided) -> Holding:
    """Of dtrain's strategies; one of the user's own is taken for copies on every rank."""
    word, part, pipelined = word_of(plan.strategy), plan.strategy, plan.mesh.pp > 1
    cpu = part.get("offload") == "cpu"
    if word in ("fsdp", "hsdp"):
        return Holding(True, part["reshard"] == "forward" and not pipelined, part.get("reduce") == "every", cpu=cpu)
    if word in ("zero1", "zero2", "zero3"):
        return Holding(True, word == "zero3" and not pipelined, word != "zero1", cpu=cpu)
    return Holding(buckets=word in ("ddp", "pipeline") and plan.mesh.pp * plan.mesh.tp * plan.mesh.ep == 1)


def flowing(plan: Decided) -> Types:
    """The types between operators: FSDP2 gathers weights in the type they are multiplied in, so embeddings, and all
    that is added to them, have it too.
    """
    types = types_of(plan)
    return replace(types, param=types.compute) if holding_of(plan).shards else types


def shards_of(plan: Decided, weight: Weight) -> int:
    """Over how many ranks of the data axes a weight is cut."""
    if not holding_of(plan).shards:
        return 1
    return plan.mesh.batch // plan.mesh.ep if weight.experts and plan.mesh.ep > 1 else plan.mesh.dp_shard * plan.mesh.cp


def gathered(plan: Decided, weight: Weight) -> Shape:
    """The shape that one rank computes with: what tp and ep left of it."""
    shape = list(weight.shape)
    if weight.experts:
        shape[0] //= plan.mesh.ep
    if weight.tp is not None:
        shape[weight.tp] = -(-shape[weight.tp] // plan.mesh.tp)
    return tuple(shape)


def piece(plan: Decided, weight: Weight) -> Shape:
    """The shape that rests on the fullest rank."""
    shape = gathered(plan, weight)
    return (-(-shape[0] // shards_of(plan, weight)), *shape[1:]) if shape else ()


State = Callable[[Part, Weight, Shape], Iterable[Shape]]


def _adamw(part: Part, weight: Weight, shape: Shape) -> Iterable[Shape]:
    return shape, shape


def _sgd(part: Part, weight: Weight, shape: Shape) -> Iterable[Shape]:
    return (shape,) if part.get("momentum") else ()


def _muon(part: Part, weight: Weight, shape: Shape) -> Iterable[Shape]:
    return (shape,) if weight.hidden else (shape, shape)


def _adafactor(part: Part, weight: Weight, shape: Shape) -> Iterable[Shape]:
    if len(shape) < 2:
        return (shape,)
    return (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])


STATE: Mapping[str, State] = {
    "adamw": _adamw, "sgd": _sgd, "muon": _muon, "adafactor": _adafactor,
    "torch.optim.AdamW": _adamw, "torch.optim.Adam": _adamw, "torch.optim.SGD": _sgd,
}  # fmt: skip
"""optimizer -> shapes of what it keeps of a weight, in the type of the weight; of one that is not here AdamW's are
taken.
"""
COUNTED = ("adamw", "adafactor", "torch.optim.AdamW", "torch.optim.Adam")
"""Optimizers that count steps of each weight, in 4 bytes; muon does for those it leaves to AdamW."""


def state_bytes(plan: Decided, weight: Weight, shape: Shape) -> int:
    """Of one weight of which `shape` rests here."""
    if not weight.trained:
        return 0
    word = word_of(plan.optim)
    kept = sum(math.prod(each) for each in STATE.get(word, _adamw)(plan.optim, weight, shape))
    counted = word in COUNTED or word not in STATE or (word == "muon" and not weight.hidden)
    return kept * types_of(plan).param + 4 * counted


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    average: int

    @property
    def all(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.average


def count_state(plan: Decided, blocks: Iterable[Block]) -> StateBytes:
    """Of these blocks, when a step ends: what the optimizer reads and leaves."""
    types, sums = types_of(plan), [0, 0, 0, 0]
    for block in blocks:
        for weight in block.weights:
            shape = piece(plan, weight)
            count = math.prod(shape)
            each = (
                count * types.param,
                count * types.param * weight.trained,
                state_bytes(plan, weight, shape),
                4 * count * weight.trained * (plan.ema is not None),
            )
            sums = [total + block.count * part for total, part in zip(sums, each, strict=True)]
    return StateBytes(*sums)


def saved(plan: Decided, shapes: Shapes) -> int:
    """Bytes of the tensors in one checkpoint, files of all ranks together, without the headers of the files."""
    types, ema, total = types_of(plan), plan.ema is not None, shapes.saved
    for block in shapes.blocks:
        for weight in block.weights:
            state = state_bytes(plan, weight, weight.shape)
            total += block.count * (weight.count * (types.param + 4 * ema * weight.trained) + state)
    return total
