"""Turns sums over a whole batch, or all held-out data, into metrics: means, and the objective's own `figures`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtrain.errors import WordsError
from dtrain.objective import Objective, check_name


def figures(
    objective: Objective, shapes: Mapping[str, Sequence[int]], totals: Sequence[float], count: float
) -> dict[str, float]:
    """Means, and what the objective makes of its sums; nan where nothing counts. `totals` are the numbers of all sums,
    one after the other, of these shapes.

    Raises WordsError for a sum with dims of an objective without `figures`, and for what they return that is no number
    with a name.
    """
    sums, start = dict[str, Any](), 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        sums[name] = torch.tensor(totals[start:end], dtype=torch.float64).view(*shape) if shape else totals[start]
        start = end
    found = {name: total / count if count else math.nan for name, total in sums.items() if not shapes[name]}
    final = getattr(objective, "figures", None)
    if final is None and len(found) < len(sums):
        name = next(name for name in sums if name not in found)
        raise WordsError(
            f"objective: its sum {name} has the shape {list(shapes[name])}, and no figure is made of it. Give the "
            "class figures(sums, count)."
        )
    own = final(sums, count) if final and count else {}
    if not isinstance(own, Mapping):
        raise WordsError(
            f"objective {type(objective).__name__}: its figures returned a {type(own).__name__}. Let it return a dict "
            "of numbers by name."
        )
    return found | dict(_figure(objective, name, value) for name, value in own.items())


def _figure(objective: Objective, name: Any, value: Any) -> tuple[str, float]:
    try:
        if isinstance(name, str):
            check_name(objective, name.removeprefix("eval_"), "figure")
            return name.removeprefix("eval_"), float(value)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        OverflowError,
    ) as error:  # RuntimeError of a tensor with several elements
        if isinstance(error, WordsError):
            raise
    raise WordsError(
        f"objective {type(objective).__name__}: its figures returned {name!r} as a {type(value).__name__}, "
        f"{str(value)[:60]!r}. "
        "Let it return a dict of numbers by name."
    )
