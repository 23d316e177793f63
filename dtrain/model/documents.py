"""Rows in which documents follow one another: the positions of tokens begin anew in each, and a token attends to its
own document alone.

    input_ids     5  8  2  7  7  1  0       # three documents, the last of one token
    position_ids  0  1  2  0  1  2  0

As in transformers, positions say all: no mask travels with a batch. Shapes: B batch, T tokens.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import WordsError

POSITIONS = "position_ids"
Mask = Callable[[Tensor], Tensor | None]

_replaced: list[Mask] = []
"""Functions that stand for `mask` where sequences are split, innermost last."""


def is_packed(inputs: Any) -> bool:
    """Whether inputs of a model say where documents begin."""
    return isinstance(inputs, Mapping) and POSITIONS in inputs


def starts(position_ids_BT: Tensor, places: Tensor) -> Tensor:
    """The place in its row at which each token's document begins, which no two documents share; int64 [B, T]. `places`:
    of the tokens in their rows.
    """
    return places - position_ids_BT


def sees(starts_BT: Tensor) -> Tensor:
    """Which token attends to which, in whole rows: its own document up to itself; bool [B, 1, T, T]."""
    alike = starts_BT[:, None, :, None] == starts_BT[:, None, None, :]
    return alike.tril_()


def mask(position_ids_BT: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The `attn_mask` of F.scaled_dot_product_attention for all layers of a forward: [B, 1, T, T], 0 or -inf, in
    `dtype`, because torch makes such a copy of a bool mask in every layer, and keeps it for the backward. None: causal.
    """
    if position_ids_BT is None:
        return None
    if _replaced:
        return _replaced[-1](position_ids_BT)
    places = torch.arange(position_ids_BT.shape[1], device=position_ids_BT.device)
    seen = sees(starts(position_ids_BT, places))
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(seen.logical_not_(), -torch.inf)


@contextmanager
def replaced(by: Mask) -> Iterator[None]:
    """A context in which `mask` is `by`, in every thread."""
    _replaced.append(by)
    try:
        yield
    finally:
        _replaced.pop()


def takes_positions(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters.values()
    return any(each.name == POSITIONS or each.kind is each.VAR_KEYWORD for each in parameters)


def check(model: nn.Module) -> None:
    """Raises WordsError for a model without an argument for the positions of its tokens."""
    if not takes_positions(model):
        raise WordsError(
            f"data.packing=pack: the forward of {type(model).__name__} takes no position_ids, so it cannot tell where "
            "a document ends: its tokens would attend to another's. model=gpt, model=moe and most models of "
            "model=hf take them. Add that argument (int64 [B, T]), or type data.packing=none."
        )


def without_cache(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """A forward pre-hook of models of transformers, which look for documents only where no keys and values are kept."""
    kept = ("cache", "past_key_values", "use_cache")
    if kwargs.get(POSITIONS) is None or any(kwargs.get(name) is not None for name in kept):
        return None
    return args, {**kwargs, "use_cache": False}
