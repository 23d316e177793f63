"""Cross entropy of the next token."""

from typing import Any

import torch.nn.functional as F

from dtrain.data import Batch
from dtrain.objective import IGNORE, Loss, logits_of


class NextToken:
    """Outputs [B, T, V], targets [B, T] int64. The loss is in nats per token that counts."""

    unit = "tokens"

    def count(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        logits = logits_of(outputs)
        return Loss(F.cross_entropy(logits.flatten(0, -2).float(), batch["targets"].flatten(), ignore_index=IGNORE, reduction="sum"))
