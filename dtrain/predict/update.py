"""Temporary memory of an optimizer's step, beside weights, gradients and its state."""

import math
from collections.abc import Iterator, Sequence

from dtrain.config.facts import fact
from dtrain.planned import Plan
from dtrain.predict.shapes import Block, Weight, types_of
from dtrain.predict.state_bytes import gathered, piece, shards_of

Shape = tuple[int, ...]


def update(plan: Plan, blocks: Sequence[Block]) -> float:
    """Bytes at the peak of a step: none of an update that is fused; otherwise `copies` of all weights, which come into
    being one by one, and `beside` those more of the one at work.
    """
    matrices = fact(plan.optim, "needs") == "matrices"
    param = types_of(plan).param
    elementwise = fact(plan.optim, "fused") or matrices
    if elementwise and (plan.device == "cuda" or param == 4):
        return _matrices(plan, blocks) if matrices else 0.0
    if matrices:
        rest = sum(_local(plan, weight) * count for count, weight in _weights(blocks) if not weight.hidden)
        return max(_matrices(plan, blocks), float(fact(plan.optim, "copies")) * param * rest)
    each = max(param, 4) if fact(plan.optim, "wide") else param
    copies, beside = float(fact(plan.optim, "copies")), float(fact(plan.optim, "beside", 0.0))
    done, most = 0.0, 0.0
    for block in blocks:
        sizes = [each * _local(plan, weight) * weight.trained for weight in block.weights]
        done += (block.count - 1) * copies * sum(sizes)
        for size in sizes:
            done += copies * size
            most = max(most, done + beside * size)
    return most


def _weights(blocks: Sequence[Block]) -> Iterator[tuple[int, Weight]]:
    return ((block.count, weight) for block in blocks for weight in block.weights if weight.trained)


def _local(plan: Plan, weight: Weight) -> int:
    return math.prod(piece(plan, weight))


def _matrices(plan: Plan, blocks: Sequence[Block]) -> float:
    """Of hidden matrices that are orthogonalised, all of a shape together (dtrain/optim/muon.py): a direction for each,
    and the largest stack of whole ones. Shards are gathered one by one before they are stacked. The iteration needs the
    stack, in fp32 too, two iterates and two of their squares; in bf16 first the normalised stack and its copy in bf16.
    """
    param = types_of(plan).param
    hidden = [(count, weight) for count, weight in _weights(blocks) if weight.hidden]
    stacks: dict[Shape, float] = {}
    for count, weight in hidden:
        n, square = weight.count, min(weight.shape) ** 2
        stack = (param + 4 * (param < 4)) * n
        iteration = max(6 * n, 4 * n + 4 * square) if plan.optim.get("products") == "bf16" else 8 * n + 8 * square
        most = max(stack + iteration, 2 * param * n * _is_split(plan, weight))
        stacks[weight.shape] = stacks.get(weight.shape, 0.0) + count * most
    directions = sum(count * _local(plan, weight) * param for count, weight in hidden)
    return directions + max(stacks.values(), default=0.0)


def _is_split(plan: Plan, weight: Weight) -> bool:
    return shards_of(plan, weight) > 1 or gathered(plan, weight) != weight.shape
