"""The tensors of a trace: their memory, and where the backward makes gradients of weights."""

from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

VIEWS = {f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "Unsqueeze", "ToCopy")}
"""Nodes whose gradient is that of a weight if their input is one."""


def tensors_of(tree: Any) -> list[Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, Tensor)]


def storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def weight_edges(root: Any, weights: Collection[int]) -> Iterator[tuple[Any, list[int]]]:
    """Nodes of the graph below `root` with the places of gradients that are those of weights, given by their storages,
    or of views and casts of them.
    """
    leads: dict[Any, bool] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        below = [each for each, _ in node.next_functions if each is not None]
        missing = [each for each in below if each not in leads]
        if missing:
            stack += missing
            continue
        stack.pop()
        if node in leads:
            continue
        if hasattr(node, "variable"):
            leads[node] = storage(node.variable) in weights
            continue
        leads[node] = node.name() in VIEWS and all(leads[each] for each in below)
        places = [index for index, (each, _) in enumerate(node.next_functions) if each is not None and leads[each]]
        if places:
            yield node, places
