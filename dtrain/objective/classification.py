"""Cross entropy over classes, with accuracy."""

from collections.abc import Mapping
from typing import Any

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
                "objective=classification needs integer targets, but those of the data are floats. Type "
                "objective=regression."
            )
        logits, targets = logits_of(outputs, self._losses), batch["targets"].long()
        if logits.ndim < 2 or logits.shape[:1] + logits.shape[2:] != targets.shape:
            raise WordsError(
                f"objective=classification: the model returns {list(logits.shape)} and the targets are "
                f"{list(targets.shape)}. They must be [B, classes, ...] and [B, ...]."
                + (" Type objective=next_token." if logits.shape[:-1] == targets.shape else "")
            )
        loss = Loss(nats(logits, targets), {"accuracy": (logits.detach().argmax(1) == targets).sum()})
        return add_losses(loss, outputs, self._losses, (targets != IGNORE).sum()) if self._losses else loss
