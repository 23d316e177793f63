"""Cross entropy over classes, with accuracy."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dtrain.data import IGNORE, Batch
from dtrain.errors import WordsError
from dtrain.objective import Loss, add_losses, logits_of, nats


class Classification:
    """Outputs [B, classes, ...], targets [B, ...] of integers; -100 does not count. The loss is in nats per target.
    `losses`: weights of other losses that the model returns. `weights` [classes]: the loss is the mean weighted by
    those of the targets, as in torch.nn.CrossEntropyLoss(weight=); the accuracy is not weighted.
    """

    unit = "samples"

    def __init__(
        self,
        losses: Mapping[str, float] | None = None,
        together: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._losses = losses or {}
        self._weights = torch.tensor(weights, dtype=torch.float32, device="cpu") if weights else None

    def count(self, batch: Batch) -> float:
        if self._weights is not None:
            self._check(batch["targets"], self._weights)
            return float(_sum_of(self._weights.double(), batch["targets"]))
        return int((batch["targets"] != IGNORE).sum())

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        if batch["targets"].is_floating_point():
            raise WordsError(
                "objective=classification needs integer targets, but those of the data are floats. "
                + (one_hot(batch["targets"]) or _fractions(batch["targets"]))
            )
        logits, targets = logits_of(outputs, self._losses), batch["targets"].long()
        if logits.ndim < 2 or logits.shape[:1] + logits.shape[2:] != targets.shape:
            raise WordsError(
                f"objective=classification: the model returns {list(logits.shape)} and the targets are "
                f"{list(targets.shape)}. They must be [B, classes, ...] and [B, ...]."
                + (" Type objective=next_token." if logits.shape[:-1] == targets.shape else "")
                + (f" {sentence}" if (sentence := one_hot(targets)) else "")
            )
        hits = (logits.detach().argmax(1) == targets).sum()
        if self._weights is None:
            loss = Loss(nats(logits, targets), {"accuracy": hits})
            return add_losses(loss, outputs, self._losses, (targets != IGNORE).sum()) if self._losses else loss
        weights = self._weights.to(logits.device)
        if logits.shape[1] != len(weights):
            raise WordsError(
                f"objective.weights has {len(weights)} weights, and the model has {logits.shape[1]} classes. Give "
                "each class a weight, in their order."
            )
        accuracy = torch.stack((hits, (targets != IGNORE).sum()))
        loss = Loss(nats(logits, targets, weights), {"accuracy": accuracy})
        return add_losses(loss, outputs, self._losses, _sum_of(weights, targets)) if self._losses else loss

    @property
    def figures(self) -> Callable[[Mapping[str, Any], float], Mapping[str, float]] | None:
        """As an objective may have it: the accuracy, where the count is a sum of weights and so is not its divisor."""
        return None if self._weights is None else _accuracy

    def _check(self, targets: Tensor, weights: Tensor) -> None:
        """Raises WordsError for a target without a weight."""
        outside = targets[(targets != IGNORE) & ((targets < 0) | (targets >= len(weights)))]
        if len(outside):
            raise WordsError(
                f"objective.weights has {len(weights)} weights, for the classes 0 to {len(weights) - 1}, and a target "
                f"is {int(outside[0])}. Give each class a weight, in their order."
            )


def _accuracy(sums: Mapping[str, Any], count: float) -> Mapping[str, float]:
    hits, targets = sums["accuracy"].tolist()
    return {"accuracy": hits / targets}


def _sum_of(weights: Tensor, targets: Tensor) -> Tensor:
    """The sum of the weights of the targets that count; 0-dim."""
    return weights[targets.long().clamp(min=0)].where(targets != IGNORE, 0).sum()


def one_hot(targets: Tensor) -> str:
    """A sentence about targets [B, classes] of which each row has one 1 and zeros; empty if they are others."""
    if targets.ndim != 2 or targets.shape[1] < 2 or not ((targets == 0) | (targets == 1)).all():
        return ""
    if not (targets.sum(1) == 1).all():
        return ""
    return "They look one-hot: write the number of the class instead, such as 2 for [0, 0, 1] (numpy's argmax(1))."


def _fractions(targets: Tensor) -> str:
    """A sentence about targets that are floats: one that is no class, or how whole numbers may have become floats."""
    odd = targets[targets != targets.round()]
    if len(odd):
        return f"One of them is {odd[0].item():g}: correct it if it should be a class, or type objective=regression."
    return (
        "The ones in this batch are whole numbers: if all are, write 1 instead of 1.0; if not, correct the fraction or "
        "the missing one among them, or type objective=regression."
    )
