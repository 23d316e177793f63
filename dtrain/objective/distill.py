"""Distillation (arXiv 1503.02531): the model learns the probabilities that a teacher gives to each next token."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dtrain.data import IGNORE, Batch
from dtrain.objective import Loss, logits_of
from dtrain.objective.divergence import divergence
from dtrain.objective.next_token import NextToken
from dtrain.objective.vocabulary import LARGEST_EXPONENT, token_nats


class Distill(NextToken):
    """Outputs of both models [B, T, V], targets [B, T] int64, which say what counts. The loss of a token, in nats, is

        (1 - hard) T^2 KL(softmax(teacher / T) || softmax(student / T)) + hard x cross entropy, T = temperature

    `kl` is the distance with its T^2, `cross_entropy` that of the targets. Raises WordsError if the teacher has another
    vocabulary, and as next_token.
    """

    def __init__(self, *, teacher: str, temperature: float, hard: float) -> None:
        super().__init__()
        self._temperature, self._hard = temperature, hard

    def reference(self, outputs: Any, batch: Batch) -> Tensor:
        """Logits [B, T, V] of the teacher, split as its model leaves them."""
        return logits_of(outputs)

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        logits, targets = logits_of(outputs), batch["targets"]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._hard > 0):
            nats = token_nats(logits, targets).sum()
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._hard < 1):
            distances = divergence(logits, batch["reference"], targets != IGNORE, self._temperature)
            kl = self._temperature**2 * distances.sum()
        return Loss((1 - self._hard) * kl + self._hard * nats, {"kl": kl.detach(), "cross_entropy": nats.detach()})

    def figures(self, sums: Mapping[str, Any], count: float) -> dict[str, float]:
        """Perplexity: exp of the cross entropy of the targets."""
        return {"perplexity": math.exp(min(sums["cross_entropy"] / count, LARGEST_EXPONENT))}
