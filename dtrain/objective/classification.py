"""Cross entropy over classes, with accuracy."""

from typing import Any

import torch.nn.functional as F

from dtrain.data import Batch
from dtrain.errors import WordsError
from dtrain.objective import IGNORE, Loss, logits_of


class Classification:
    """Outputs [B, classes, ...], targets [B, ...] of whole numbers, of which -100 does not count. The loss is in nats per target."""

    unit = "samples"

    def count(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        if batch["targets"].is_floating_point():
            raise WordsError("objective=classification needs whole numbers as targets, the data has fractions. Type objective=regression.")
        logits, targets = logits_of(outputs), batch["targets"].long()
        if logits.ndim < 2 or logits.shape[:1] + logits.shape[2:] != targets.shape:
            raise WordsError(
                f"objective=classification: the model gives {list(logits.shape)}, the targets are {list(targets.shape)}. "
                "Needed are [B, classes, ...] and [B, ...]." + (" Type objective=next_token." if logits.shape[:-1] == targets.shape else "")
            )
        return Loss(
            F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum"),
            {"accuracy": (logits.detach().argmax(1) == targets).sum()},
        )
