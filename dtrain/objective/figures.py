"""Turns sums over a whole batch, or all held-out data, into metrics: means, and the objective's own `figures`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtrain.errors import WordsError, an
from dtrain.objective import Objective, check_name


def figures(
    objective: Objective, shapes: Mapping[str, Sequence[int]], totals: Sequence[float], count: float
) -> dict[str, float]:
    """The mean of each scalar sum (nan if `count` is 0), and the objective's own `figures`. `totals` holds the numbers
    of all sums, one after the other, in these shapes.

    Raises WordsError if an objective without `figures` has a sum with dims, or if `figures` returns anything but named
    numbers.
    """
    sums, start = dict[str, Any](), 0
    for name, shape in shapes.items():
        end = start + math.prod(shape)
        sums[name] = torch.tensor(totals[start:end], dtype=torch.float64).view(*shape) if shape else totals[start]
        start = end
    means = {name: total / count if count else math.nan for name, total in sums.items() if not shapes[name]}
    final = getattr(objective, "figures", None)
    if final is None and len(means) < len(sums):
        name = next(name for name in sums if name not in means)
        raise WordsError(
            f"objective: its sum {name} has the shape {list(shapes[name])}, and nothing turns it into a number. Give "
            "the class a method figures(sums, count)."
        )
    own = final(sums, count) if final and count else {}
    if not isinstance(own, Mapping):
        raise WordsError(
            f"objective {type(objective).__name__}: its figures returned {an(own)}. Let it return a dict "
            "of numbers by name."
        )
    return means | dict(_figure(objective, name, value) for name, value in own.items())


def _figure(objective: Objective, name: Any, value: Any) -> tuple[str, float]:
    try:
        if isinstance(name, str):
            check_name(objective, name.removeprefix("eval_"), "figure")
            return name.removeprefix("eval_"), float(value)
    # a tensor with several elements raises RuntimeError
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, WordsError):
            raise
    raise WordsError(
        f"objective {type(objective).__name__}: its figures returned {name!r} as {an(value)}, "
        f"{str(value)[:60]!r}. Let it return a dict of numbers by name."
    )
