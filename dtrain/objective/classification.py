"""Cross entropy over classes, with accuracy."""

from typing import Any

import torch.nn.functional as F

from dtrain.data import Batch
from dtrain.errors import WordsError
from dtrain.objective import Loss, logits_of


class Classification:
    """Outputs [B, classes], targets [B] of whole numbers. The loss is in nats per sample."""

    unit = "samples"

    def count(self, batch: Batch) -> int:
        return len(batch["targets"])

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        if batch["targets"].is_floating_point():
            raise WordsError("objective=classification needs whole numbers as targets, the data has fractions. Type objective=regression.")
        logits, targets = logits_of(outputs), batch["targets"].long()
        return Loss(
            F.cross_entropy(logits.float(), targets, reduction="sum"),
            {"accuracy": (logits.detach().argmax(-1) == targets).sum()},
        )
