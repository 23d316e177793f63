"""The loss of torchtitan that is not compiled: cross entropy over the logits of a microbatch at a time, in fp32."""

from typing import Any, ClassVar

import torch.nn.functional as F

from dtrain.data import IGNORE, Batch
from dtrain.objective import Loss, logits_of


class WholeLogits:
    about: ClassVar = {"needs": "tokens"}
    unit = "tokens"

    def count(self, batch: Batch) -> int:
        return int((batch["targets"] != IGNORE).sum())

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    # https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/loss.py
    def loss(self, outputs: Any, batch: Batch) -> Loss:
        logits = logits_of(outputs).flatten(0, 1).float()
        return Loss(F.cross_entropy(logits, batch["targets"].flatten(), ignore_index=IGNORE, reduction="sum"))
