"""The loss that the model computes itself, from the labels that it is called with: `loss` of its output, or all of it
if it is one number.
"""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from dtrain.data import IGNORE, Batch
from dtrain.data.shift import leads
from dtrain.errors import WordsError
from dtrain.objective import Loss


class Own:
    """The model is called with the targets as `labels`. Its loss is taken for a mean over what `over` says:

    targets      those of the microbatch that are not -100
    next_tokens  the same without the first of every sample, which causal models of Hugging Face shift away
    samples      the samples of the microbatch

    It is multiplied by their number, so that microbatches that count differently weigh as much as they count. What is
    no such mean, as a router's loss, depends on which samples are seen together: `together` of them, which fixes the
    microbatch.
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
                    "objective.over=next_tokens: the model shifts its labels, and the targets are the next tokens "
                    "already. Leave data.shift out."
                )
        return int(self._counted(batch["targets"]))

    def inputs(self, batch: Batch) -> Any:
        inputs, labels = batch["inputs"], {self._labels: batch["targets"]}
        return {**inputs, **labels} if isinstance(inputs, Mapping) else (inputs, labels)

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise WordsError(
                f"objective=own: the model returns a {type(outputs).__name__} without a `loss` that is one number, "
                "though it is called with "
                f"{self._labels}. Type objective.labels=<what its forward calls them>, or another objective."
            )
        if self._over == "targets" and "CausalLM" in type(outputs).__name__:
            raise WordsError(
                "objective=own: causal models of Hugging Face shift their labels. Type objective.over=next_tokens."
            )
        return Loss(loss.float().reshape(()) * self._counted(batch["targets"]))

    def _counted(self, targets: Any) -> int | Tensor:
        if not isinstance(targets, Tensor):
            raise WordsError(
                "objective=own: the targets have several parts. Give one of them in data.targets, and the others in "
                "data.inputs."
            )
        if self._over == "samples" or targets.is_floating_point():
            return len(targets)
        return (targets[:, 1:] if self._over == "next_tokens" else targets).ne(IGNORE).sum()
