"""exp of the cross entropy per token."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from dtrain.objective import nats
from dtrain.objective.vocabulary import LARGEST_EXPONENT


class Perplexity:
    rows: ClassVar[bool] = False

    def part(self, scores: Tensor, targets: Tensor) -> Tensor:
        """[nats, tokens]."""
        return torch.stack([nats(scores, targets).double(), scores.new_tensor(len(targets)).double()])

    def value(self, whole: Tensor) -> float:
        total, tokens = whole.tolist()
        return math.exp(min(total / tokens, LARGEST_EXPONENT)) if tokens else math.nan
