"""Cross entropy of the next token."""

from typing import Any

import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from dtrain.data import Batch
from dtrain.objective import IGNORE, Loss, logits_of
from dtrain.objective.vocabulary import cross_entropy


class NextToken:
    """Outputs [B, T, V], targets [B, T] int64. The loss is in nats per token that counts."""

    unit = "tokens"

    def count(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        logits = logits_of(outputs)
        if isinstance(logits, DTensor):
            return Loss(cross_entropy(logits, batch["targets"], ignore=IGNORE))
        return Loss(F.cross_entropy(logits.flatten(0, -2).float(), batch["targets"].flatten(), ignore_index=IGNORE, reduction="sum"))
