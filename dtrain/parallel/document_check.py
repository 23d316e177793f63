"""Checks before the first step that a model keeps the documents of packed rows apart.

Rolled so that another of its documents comes first, a row must give the same outputs in another order. A model that
takes position_ids but attends across documents, or carries a state from one to the next, gives others, and would train
on what its tokens must not see.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model import own_class
from dtrain.model.documents import POSITIONS
from dtrain.objective import answer
from dtrain.parallel.checks import distance, first_rows, quiet, tolerance_of
from dtrain.precision import Precision

LAYERS = 10
"""How much more than one module a whole model may round."""


def check_documents(
    model: nn.Module, batch: Any, forward: Callable[[Any], Any], *, mesh: Mesh, precision: Precision
) -> None:
    """All ranks of the mesh call it. Raises WordsError if the outputs of a document depend on another."""
    some = first_rows(batch)
    positions = some["inputs"][POSITIONS]
    T = positions.shape[1]
    # the place of the second document of each row; 0 if there is one alone
    second = ((positions == 0).cumsum(1) < 2).sum(1) % T
    places = (torch.arange(T, device=positions.device) + second[:, None]) % T
    with quiet(model):
        here = answer(forward(some)).detach()
        there = answer(forward({name: _rolled(part, places) for name, part in some.items()})).detach()
    index = places.view(*places.shape, *[1] * (here.ndim - 2)).expand_as(here)
    off = distance(here.gather(1, index), there, here)
    worst = max(mesh.gather(off)) if mesh.world > 1 else off
    if worst > LAYERS * tolerance_of(precision, mesh.device):
        raise WordsError(
            f"data.packing=pack: {own_class(model).__name__} takes position_ids, but its outputs for a document depend "
            f"on the others of the row (by {worst:.1g} of the largest). It attends across documents or carries a state "
            "from one to the next. Type data.packing=none."
        )


def _rolled(part: Any, places: Tensor) -> Any:
    """Entries of dim 1 in the order of `places`, of all tensors with one for each token."""
    if not isinstance(part, Tensor):
        return {name: _rolled(value, places) for name, value in part.items()}
    if part.shape[:2] != places.shape:
        return part
    return part.gather(1, places.view(*places.shape, *[1] * (part.ndim - 2)).expand_as(part))
