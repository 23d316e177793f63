"""Direct preference optimization (arXiv 2305.18290): the policy makes the chosen answer of a pair more likely than the
rejected one, relative to the reference it began as.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.data import IGNORE, Batch
from dtrain.errors import WordsError, an
from dtrain.objective import Loss, logits_of
from dtrain.objective.vocabulary import token_nats

PAIRS = (
    "objective=dpo takes pairs: a sample has targets [2, T], the chosen row first, and inputs of the same shape. {} "
    "Type data=chat data.path=<rows with chosen and rejected>."
)


class Scores(NamedTuple):
    """`log_p` [2B]: log-probability of each answer, all chosen ones first; `tokens` [2B]: how many it has."""

    log_p: Tensor
    tokens: Tensor


class DPO:
    """Inputs [B, 2, T] and targets [B, 2, T], the chosen row first; targets are the next tokens, -100 on the prompt and
    on padding. The model gets rows [2B, T], all chosen ones first. With d the difference of the answers' log-ratios to
    the reference, the loss of a pair is

        sigmoid   -(1 - s) log sigmoid(beta d) - s log sigmoid(-beta d), s = label_smoothing (conservative DPO)
        hinge     max(0, 1 - beta d) (SLiC, arXiv 2305.10425)
        ipo       (d - 1 / (2 beta))^2, d of the means over the tokens of an answer (arXiv 2310.12036)

    Rewards are beta times the log-ratios. Raises WordsError for a batch without pairs, and for a pair without tokens
    that count.
    """

    unit = "samples"

    def __init__(
        self, *, beta: float, loss: Literal["sigmoid", "hinge", "ipo"], label_smoothing: float, chunk: int | str = 0
    ) -> None:
        self._beta, self._loss, self._smoothing, self.chunk = beta, loss, label_smoothing, chunk

    def count(self, batch: Batch) -> int:
        """The number of pairs."""
        targets = batch["targets"]
        if not isinstance(targets, Tensor) or targets.ndim != 3 or targets.shape[1] != 2:
            has = list(targets.shape[1:]) if isinstance(targets, Tensor) else f"{an(targets)}"
            raise WordsError(PAIRS.format(f"Those of the data are {has}."))
        for name, part in _named(batch["inputs"]):
            if part.shape[:3] != targets.shape:
                raise WordsError(PAIRS.format(f"The targets are {list(targets.shape)}, {name} {list(part.shape)}."))
        if not bool((targets != IGNORE).any(2).all()):
            raise WordsError(
                "objective=dpo: an answer has no token that counts: all its targets are -100. Leave the pair out, or "
                "type a larger data.sequence if its prompt fills the row."
            )
        return len(targets)

    def inputs(self, batch: Batch) -> Any:
        inputs = batch["inputs"]
        if isinstance(inputs, Mapping):
            return {name: _rows(part) for name, part in inputs.items()}
        return _rows(inputs)

    def reference(self, outputs: Any, batch: Batch) -> Tensor:
        """Log-probabilities [2B] of the reference, from its outputs."""
        return _scores(logits_of(outputs), batch).log_p

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        log_p, tokens = _scores(logits_of(outputs), batch)
        ratio = log_p - batch["reference"]
        chosen, rejected = ratio.chunk(2)
        if self._loss == "ipo":
            ratio = ratio / tokens
        margin = ratio.chunk(2)[0] - ratio.chunk(2)[1]
        rewards = self._beta * chosen.detach(), self._beta * rejected.detach()
        return Loss(
            self._of(margin).sum(),
            {
                "reward_chosen": rewards[0].sum(),
                "reward_rejected": rewards[1].sum(),
                "reward_margin": (rewards[0] - rewards[1]).sum(),
                "reward_accuracy": (rewards[0] > rewards[1]).sum(),
            },
        )

    def _of(self, margin: Tensor) -> Tensor:
        """The loss of each pair [B]."""
        if self._loss == "ipo":
            return (margin - 1 / (2 * self._beta)) ** 2
        if self._loss == "hinge":
            return torch.relu(1 - self._beta * margin)
        logits, smoothing = self._beta * margin, self._smoothing
        return -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing


def _named(inputs: Any) -> list[tuple[str, Tensor]]:
    return list(inputs.items()) if isinstance(inputs, Mapping) else [("the inputs", inputs)]


def _rows(pairs: Tensor) -> Tensor:
    """[B, 2, ...] -> [2B, ...], all chosen ones first."""
    return pairs.transpose(0, 1).flatten(0, 1)


def _scores(logits: Tensor, batch: Batch) -> Scores:
    targets = _rows(batch["targets"])
    return Scores(-token_nats(logits, targets).sum(1), (targets != IGNORE).sum(1))
