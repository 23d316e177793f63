"""Cross entropy of the next token."""

import math
from collections.abc import Mapping
from typing import Any

from dtrain.data import IGNORE, Batch
from dtrain.data.shift import copies
from dtrain.errors import WordsError
from dtrain.objective import Loss, add_losses, logits_of
from dtrain.objective.vocabulary import LARGEST_EXPONENT, cross_entropy

COPIES = (
    "objective=next_token: the targets of the first samples equal their inputs (as Hugging Face's labels do), so the "
    "model would learn to copy. "
    "Type data.shift=true (data=dataset), which makes the next token the target, or shift the targets in the data."
)


class NextToken:
    """Outputs [B, T, V], targets [B, T] int64. The loss is in nats per token that counts; its perplexity is reported
    too. `losses`: weights of other losses that the model returns. `chunk`: tokens whose logits exist at a time.

    Raises WordsError if the first targets equal the inputs: the model would learn to copy.
    """

    unit = "tokens"

    def __init__(
        self, losses: Mapping[str, float] | None = None, together: int | None = None, chunk: int | str = 0
    ) -> None:
        self._losses, self._checked, self.chunk = losses or {}, False, chunk

    def count(self, batch: Batch) -> int:
        if not self._checked:
            self._checked = True
            if copies(batch):
                raise WordsError(COPIES)
        return int((batch["targets"] != IGNORE).sum())

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        logits, targets = logits_of(outputs, self._losses), batch["targets"]
        loss = Loss(cross_entropy(logits, targets))
        return add_losses(loss, outputs, self._losses, (targets != IGNORE).sum()) if self._losses else loss

    def figures(self, sums: Mapping[str, Any], count: float) -> dict[str, float]:
        """Perplexity: exp of the cross entropy, without the other losses."""
        nats = sums["loss"] - sum(
            weight * sums.get("model_loss" if name == "loss" else name, 0.0) for name, weight in self._losses.items()
        )
        return {"perplexity": math.exp(min(nats / count, LARGEST_EXPONENT))}
