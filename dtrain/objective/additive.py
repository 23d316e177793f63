"""Whether a user's loss is a sum over samples, which alone is the same however a batch is cut: before the first update
the mean of a few samples is held against that of two parts of them.

A contrastive loss, triplets, a loss divided by a statistic of its batch, and a mean of means are no such sums.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from copy import copy, deepcopy
from typing import Any
from warnings import catch_warnings

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from dtrain.data import Batch
from dtrain.errors import WordsError
from dtrain.model import seeds
from dtrain.objective import Objective, counted
from dtrain.objective.head import Deferred
from dtrain.objective.state import leaves_of

SAMPLES, BYTES = 32, 1 << 28
"""The most samples that are compared, and the most bytes of their outputs."""
UNLIKE = 8
"""So many samples are cut into parts of unlike sizes, of which the targets that count are hardly ever the same part."""
SAME, TOLERANCE, ROUNDED = 1e-6, 1e-4, 8
"""Largest relative differences: of two equal calls, and of means in fp64; in other types, that many times their
precision if it is more.
"""
Rows = Callable[[Tensor], Tensor]


def check_sum(objective: Objective, outputs: Any, batch: Batch, forwards: int, whole: bool | None) -> list[str]:
    """Sentences about the loss of a microbatch, which is one of the `forwards` of a step on all ranks; none for a sum
    over samples, and where it cannot be told. `whole`: the fact that the objective states. Raises WordsError if the
    loss is no such sum and there are several forwards.
    """
    if whole is not None or type(objective).__module__.startswith("dtrain.objective."):
        return []
    means = None
    # user's code, on parts of a batch that it never sees
    with suppress(Exception), catch_warnings(action="ignore"), torch.no_grad(), seeds.kept():
        means = _means(objective, outputs, batch)
    if means is None:
        return []
    sentence = (
        f"objective {type(objective).__name__}: the loss of some samples is {means[0]:.6g} at once and {means[1]:.6g} "
        "from two parts of them. It is no sum over samples (a mean is none: return the sum), so it depends on which of "
        "them a forward sees together"
    )
    if forwards == 1:
        return [f"{sentence}: on several ranks or in microbatches its numbers are others."]
    size = len(_samples(batch))
    raise WordsError(
        f"{sentence}, and here it sees {size} of {size * forwards}. Type devices=1 without microbatch; or state about "
        f"= {{'whole': True}} in the class, give it an argument `together`, and type objective.together={size}: the "
        "same numbers on every mesh with that microbatch. If the loss is a sum all the same, state about = {'whole': "
        "False}."
    )


def _means(objective: Objective, outputs: Any, batch: Batch) -> tuple[float, float] | None:
    """(the mean of some samples, that of two parts of them) if the two differ and nothing is drawn, else None."""
    size, leaves = len(_samples(batch)), [each for each in tree_leaves(_fields(outputs)) if isinstance(each, Tensor)]
    each = max(1, sum(leaf.numel() * 8 for leaf in leaves) // max(1, size))
    count = min(SAMPLES, size, BYTES // each) // 2 * 2
    if count < 2 or any(isinstance(leaf, Deferred | DTensor) for leaf in leaves):
        return None
    if not any(leaf.ndim and leaf.shape[0] % size == 0 for leaf in leaves):
        return None
    result = None
    for major in (True, False) if any(leaf.ndim and leaf.shape[0] > size for leaf in leaves) else (True,):
        cut = count // 2 - (count >= UNLIKE)
        parts = (slice(count), slice(count), slice(cut), slice(cut, count))
        at_once, again, first, second = (
            _sum(objective, outputs, batch, _rows(size, part, major=major)) for part in parts
        )
        total, divisor = first[0] + second[0], first[1] + second[1]
        is_drawn = abs(at_once[0] - again[0]) > SAME * abs(again[0])
        if is_drawn or not divisor or not at_once[1] or not math.isfinite(total + at_once[0]):
            return None
        means = at_once[0] / at_once[1], total / divisor
        largest = max(abs(means[0]), (abs(first[0]) + abs(second[0])) / divisor)
        if abs(means[0] - means[1]) <= max(TOLERANCE, at_once[2]) * largest:
            return None
        result = result or means
    return result


def _sum(objective: Objective, outputs: Any, batch: Batch, rows: Rows) -> tuple[float, float, float]:
    """(sum, count, relative rounding error) of some rows, in fp64 if the objective can; it stays as it was."""
    outputs, batch = _mapped(outputs, rows), _mapped(batch, rows)
    leaves = [each for each in tree_leaves((_fields(outputs), batch)) if isinstance(each, Tensor)]
    device = leaves[0].device.type
    with suppress(Exception), torch.autocast(device, enabled=False):
        return *_of_copy(objective, _mapped(outputs, _wide), _mapped(batch, _wide)), 0.0
    types = {each.dtype for each in leaves if each.is_floating_point()} | (
        {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
    )
    return *_of_copy(objective, outputs, batch), ROUNDED * max(torch.finfo(each).eps for each in types)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _of_copy(objective: Objective, outputs: Any, batch: Batch) -> tuple[float, float]:
    memo = {id(each): each for _, each in leaves_of(objective) if isinstance(each, nn.Parameter)}
    mine: Objective = deepcopy(objective, memo)
    return mine.loss(outputs, batch).sum.double().item(), counted(mine, batch)


def _rows(size: int, part: slice, *, major: bool) -> Rows:
    """A function to take `part` of the `size` samples of a tensor, of which each may have several rows: view by view
    (`major`), or sample by sample. Tensors of other lengths stay.
    """

    def rows(tensor: Tensor) -> Tensor:
        if not tensor.ndim or not len(tensor) or len(tensor) % size:
            return tensor
        if major:
            return tensor.reshape(-1, size, *tensor.shape[1:])[:, part].flatten(0, 1)
        return tensor.reshape(size, -1, *tensor.shape[1:])[part].flatten(0, 1)

    return rows


def _samples(batch: Batch) -> Tensor:
    """A tensor with an entry for each sample."""
    return next(each for each in tree_leaves([batch["targets"], batch["inputs"]]) if isinstance(each, Tensor))


def _fields(outputs: Any) -> Any:
    """The attributes of an object that is no tensor and no container."""
    is_object = hasattr(outputs, "__dict__") and not isinstance(outputs, Tensor)
    return vars(outputs) if is_object and tree_leaves(outputs)[0] is outputs else outputs


def _mapped(outputs: Any, change: Rows) -> Any:
    if _fields(outputs) is outputs:
        return tree_map_only(Tensor, change, outputs)
    changed = copy(outputs)
    vars(changed).update(tree_map_only(Tensor, change, vars(outputs)))
    return changed
