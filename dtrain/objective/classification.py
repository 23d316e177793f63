"""Cross entropy over classes, with accuracy."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dtrain.data import IGNORE, Batch
from dtrain.errors import WordsError
from dtrain.objective import Loss, add_losses, logits_of, nats


class Classification:
    """Outputs [B, classes, ...], targets [B, ...] of integers; -100 does not count. The loss is in nats per target.
    `losses`: weights of other losses that the model returns.
    """

    unit = "samples"

    def __init__(self, losses: Mapping[str, float] | None = None, together: int | None = None) -> None:
        self._losses = losses or {}

    def count(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        if batch["targets"].is_floating_point():
            raise WordsError(
                "objective=classification needs integer targets, but those of the data are floats. "
                + (one_hot(batch["targets"]) or _whole(batch["targets"]) or "Type objective=regression.")
            )
        logits, targets = logits_of(outputs, self._losses), batch["targets"].long()
        if logits.ndim < 2 or logits.shape[:1] + logits.shape[2:] != targets.shape:
            raise WordsError(
                f"objective=classification: the model returns {list(logits.shape)} and the targets are "
                f"{list(targets.shape)}. They must be [B, classes, ...] and [B, ...]."
                + (" Type objective=next_token." if logits.shape[:-1] == targets.shape else "")
                + (f" {sentence}" if (sentence := one_hot(targets)) else "")
            )
        loss = Loss(nats(logits, targets), {"accuracy": (logits.detach().argmax(1) == targets).sum()})
        return add_losses(loss, outputs, self._losses, (targets != IGNORE).sum()) if self._losses else loss


def one_hot(targets: Tensor) -> str:
    """A sentence about targets [B, classes] of which each row has one 1 and zeros; empty if they are others."""
    if targets.ndim != 2 or targets.shape[1] < 2 or not ((targets == 0) | (targets == 1)).all():
        return ""
    if not (targets.sum(1) == 1).all():
        return ""
    return "They look one-hot: write the number of the class instead, such as 2 for [0, 0, 1] (numpy's argmax(1))."


def _whole(targets: Tensor) -> str:
    """A sentence about fractions that are whole numbers; empty if they are others."""
    if not (targets == targets.round()).all():
        return ""
    return "They are whole numbers written as fractions: write 1 instead of 1.0, or type objective=regression."
