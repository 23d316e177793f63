"""The loss that the model computes itself from its labels: `loss` of its output, or the output if it is one number."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from dtrain.data import IGNORE, Batch
from dtrain.data.shift import leads
from dtrain.errors import WordsError, an
from dtrain.objective import Loss, sum_of


class Own:
    """The model is called with the targets as `labels`. `over` says what its loss is a mean over:

    targets      targets of the microbatch that are not -100
    next_tokens  the same without the first of every sample, which causal models of Hugging Face shift away
    samples      samples of the microbatch

    The loss is multiplied by their number, so that every microbatch gets the weight of its count. A loss that is not
    such a mean, such as a router's, depends on which samples are in one microbatch: `together` fixes their number.
    """

    def __init__(
        self,
        labels: str = "labels",
        over: Literal["targets", "next_tokens", "samples"] = "targets",
        together: int | None = None,
    ) -> None:
        self._labels, self._over, self._checked = labels, over, False
        self.unit = "tokens" if over == "next_tokens" else "samples"

    def count(self, batch: Batch) -> int:
        if not self._checked:
            self._checked = True
            if self._over == "next_tokens" and leads(batch):
                raise WordsError(
                    "objective.over=next_tokens: the model shifts its labels, but the targets are the next tokens "
                    "already. Leave out data.shift."
                )
        return int(self._counted(batch["targets"]))

    def inputs(self, batch: Batch) -> Any:
        inputs, labels = batch["inputs"], {self._labels: batch["targets"]}
        return {**inputs, **labels} if isinstance(inputs, Mapping) else (inputs, labels)

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise WordsError(
                f"objective=own: the model was called with {self._labels}, but returns {an(outputs)} "
                "without a `loss` that is one number. Type objective.labels=<argument of its forward>, or another "
                "objective."
            )
        if loss.is_complex():
            raise WordsError("objective=own: the loss of the model is complex. Return a real one, such as its abs().")
        if self._over == "targets" and "CausalLM" in type(outputs).__name__:
            raise WordsError(
                "objective=own: causal models of Hugging Face shift their labels. Type objective.over=next_tokens."
            )
        return Loss(sum_of(loss.float().reshape(()), self._counted(batch["targets"])))

    def _counted(self, targets: Any) -> int | Tensor:
        if not isinstance(targets, Tensor):
            raise WordsError(
                "objective=own: the targets have several parts. Name one of them in data.targets and the others in "
                "data.inputs."
            )
        if self._over == "samples" or targets.is_floating_point():
            return len(targets)
        return (targets[:, 1:] if self._over == "next_tokens" else targets).ne(IGNORE).sum()
