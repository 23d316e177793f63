"""The optimizer of a LightningModule's own configure_optimizers. The words of `schedule` scale its learning rates."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtrain.errors import WordsError, an
from dtrain.optim import Optimizer


def build(*, model: nn.Module) -> Optimizer:
    """Raises WordsError unless configure_optimizers returns one optimizer, without a scheduler."""
    configure: Any = getattr(model, "configure_optimizers", None)
    if configure is None:
        raise WordsError(f"optim=lightning: {type(model).__name__} has no configure_optimizers. Type optim=adamw.")
    returned = configure()
    optimizers, schedulers = _parts(returned)
    if schedulers:
        kinds = ", ".join(type(each).__name__ for each in schedulers)
        raise WordsError(
            f"optim=lightning: configure_optimizers returns {kinds}, which dtrain does not step. Type optim=<word> "
            "optim.lr=<value> schedule=linear, cosine, constant or wsd, or return the optimizer alone."
        )
    if len(optimizers) != 1 or not isinstance(optimizers[0], torch.optim.Optimizer):
        raise WordsError(
            f"optim=lightning: configure_optimizers returns {an(returned)}. dtrain steps one optimizer. Return it "
            "alone, or type loop=<a loop of your own> trust=[<its package>]."
        )
    return optimizers[0]


def _parts(returned: Any) -> tuple[list[Any], list[Any]]:
    """(optimizers, schedulers) in any of the forms that Lightning takes."""
    if isinstance(returned, Mapping):
        schedulers = [returned["lr_scheduler"]] if returned.get("lr_scheduler") else []
        return [returned.get("optimizer")], [_scheduler(each) for each in schedulers]
    if not isinstance(returned, list | tuple):
        return [returned], []
    if len(returned) == 2 and all(isinstance(part, list | tuple) for part in returned):
        return [*returned[0]], [_scheduler(each) for each in returned[1]]
    parts = [_parts(each) for each in returned]
    return [one for ones, _ in parts for one in ones], [one for _, ones in parts for one in ones]


def _scheduler(given: Any) -> Any:
    return given.get("scheduler") if isinstance(given, Mapping) else given
