"""The loss of a LightningModule's own training_step:
https://lightning.ai/docs/pytorch/stable/common/lightning_module.html

Lightning itself is not needed: any module with a training_step will do. Its Trainer, and what that calls, is not there:
what the class cannot do without is refused.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from dtrain.data import Batch
from dtrain.errors import WordsError, an
from dtrain.objective import COLUMNS, Loss

TRAINER = ("trainer", "current_epoch", "global_step", "optimizers", "lr_schedulers", "manual_backward")
"""Attributes that only Lightning's Trainer fills."""
CALLED = (
    "backward", "configure_gradient_clipping", "configure_model", "configure_sharded_model", "lr_scheduler_step",
    "optimizer_step", "optimizer_zero_grad", "setup", "teardown", "transfer_batch_to_device",
)  # fmt: skip
"""Methods beside those in on_ that Lightning's Trainer calls while it trains."""
ASIDE = ("on_test", "on_predict", "on_gpu")
"""Begins of methods that it calls at other times."""


class Lightning:
    """Calls training_step in training and validation_step, if the class has one, in an evaluation, with the batch that
    a DataLoader gives: `(inputs, targets)`, or a mapping in which the targets are called `target`.

    The loss that it returns is taken for a mean over samples. Numbers that it logs are metrics, means over samples too.
    Of `without`, methods are not called, and names that are logged are left out. The loss may depend on which samples
    are in one microbatch: `together` fixes their number.
    """

    unit = "samples"

    def __init__(self, target: str = "labels", without: Sequence[str] = (), together: int | None = None) -> None:
        self._target, self._without = target, tuple(without)

    def redirected(self, model: nn.Module) -> nn.Module:
        """`model`, whose call with `step` is one. Raises WordsError for a class that needs Lightning's Trainer."""
        kind = type(model)
        if not hasattr(model, "training_step"):
            raise WordsError(f"objective=lightning: {kind.__name__} has no training_step. Type another objective.")
        if not getattr(model, "automatic_optimization", True):
            raise WordsError(
                f"objective=lightning: {kind.__name__} optimises by itself (automatic_optimization=False). Type "
                "loop=<a loop of your own> trust=[<its package>]."
            )
        if lost := [name for name in _overridden(kind) if name not in self._without]:
            raise WordsError(
                f"objective=lightning: {kind.__name__} has {', '.join(lost)}, which only Lightning's Trainer calls. "
                f"Type objective.without=[{','.join([*self._without, *lost])}] to train without."
            )
        model.__class__ = _stepping(cast(Hashable, kind))
        return model

    def count(self, batch: Batch) -> int:
        return len(batch["targets"])

    def inputs(self, batch: Batch) -> Any:
        inputs, targets = batch["inputs"], batch["targets"]
        given = {**inputs, self._target: targets} if isinstance(inputs, Mapping) else (inputs, targets)
        return given, {"step": True}

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        loss, count = outputs["logits"], len(batch["targets"])
        logged = {name: value for name, value in outputs["logged"].items() if name not in (*COLUMNS, *self._without)}
        for name, value in logged.items():
            if not isinstance(value, int | float | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
                raise WordsError(
                    f"objective=lightning: {name} is logged as {an(value)}, which is no number. Type "
                    f"objective.without=[{','.join([*self._without, name])}] to leave it out; metrics of held-out data "
                    "are evaluate.metrics."
                )
        means = {name: torch.as_tensor(value, device=loss.device).detach() for name, value in logged.items()}
        return Loss(loss * count, {name: mean.float().reshape(()) * count for name, mean in means.items()})


class _Stepping(nn.Module):
    """Stands before the class of a module: a call with `step` runs a step in which calls of the module itself pass by
    its hooks, as the call around them has run these.
    """

    def __call__(self, *given: Any, **named: Any) -> Any:
        is_inside = vars(self).get("_logged") is not None
        return self.forward(*given, **named) if is_inside else super().__call__(*given, **named)

    def forward(self, *given: Any, step: bool = False, **named: Any) -> Any:
        if not step:
            return super().forward(*given, **named)
        name = "training_step" if self.training or not _own(type(self), "validation_step") else "validation_step"
        logged = vars(self)["_logged"] = dict[str, Any]()
        try:
            returned = getattr(self, name)(given[0], 0)
        finally:
            del vars(self)["_logged"]
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        loss = logged.get("val_loss") if loss is None and name == "validation_step" else loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise WordsError(
                f"objective=lightning: {name} returned {an(returned)}. Return the loss, one number"
                + (", or log it as val_loss." if name == "validation_step" else ".")
            )
        return {"logits": loss.float().reshape(()), "logged": logged}

    def log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        if (logged := vars(self).get("_logged")) is not None:
            logged[name] = value

    def log_dict(self, dictionary: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value)


@cache
def _stepping(kind: Any) -> Any:
    absent = {
        name: property(_refusing(kind.__name__, name))
        for name in TRAINER
        if hasattr(kind, name) and not _own(kind, name)
    }
    return type(kind.__name__, (_Stepping, kind), {"__module__": kind.__module__, **absent})


def _refusing(owner: str, name: str) -> Any:
    def refuse(_: Any) -> Any:
        raise WordsError(
            f"objective=lightning: {owner} reads self.{name}, which only Lightning's Trainer has. Type "
            "objective=<word>, which calls forward alone, or write the loss as an objective of your own."
        )

    return refuse


def _own(kind: type, name: str) -> bool:
    """Whether a class has a method that is not Lightning's."""
    owner = next((each for each in kind.__mro__ if name in vars(each)), object)
    return owner is not object and owner is not nn.Module and owner.__module__.split(".")[0] not in LIGHTNING


LIGHTNING = ("lightning", "pytorch_lightning", "dtrain")


def _overridden(kind: type) -> list[str]:
    """The methods of a class that Lightning's Trainer would call while it trains, beside the steps."""
    begun = [name for name in dir(kind) if name.startswith("on_") and not name.startswith(ASIDE)]
    return [name for name in [*CALLED, *begun] if hasattr(kind, name) and _own(kind, name)]
