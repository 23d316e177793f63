"""A step of an optimizer, which may be the user's own."""

import inspect

from torch.distributed.tensor import DTensor

from dtrain.errors import WordsError, first_line
from dtrain.optim import Optimizer, inner


def check_step(optimizer: Optimizer) -> None:
    """Raises WordsError if its `step` needs an argument, as torch.optim.LBFGS needs a closure."""
    needed = [
        name
        for name, each in inspect.signature(optimizer.step).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise WordsError(
            f"optim: {type(optimizer).__name__}.step needs {' and '.join(needed)}, but a run computes the gradient "
            "once for each step, and calls step(). Choose an optimizer whose step takes no arguments."
        )


def update(optimizer: Optimizer) -> None:
    """One step. Raises WordsError if it does what torch cannot do to weights that are split over ranks."""
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        split = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        if not split or "harding" not in str(error):  # "Sharding propagation failed", "no sharding strategy registered"
            raise
        names = " and ".join(dict.fromkeys(type(each).__name__ for each in inner(optimizer)))
        raise WordsError(
            f"optim: {names} cannot update weights that are split over ranks: {first_line(error)} Type strategy=ddp "
            "without mesh.tp, where every rank holds whole weights, or choose another optimizer."
        ) from error
