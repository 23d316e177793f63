"""Mean squared error over all outputs."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F

from dtrain.data import Batch
from dtrain.errors import WordsError
from dtrain.objective import Loss, add_losses, logits_of


class Regression:
    """Outputs and targets have the same shape, dims of size 1 aside. Raises WordsError otherwise: broadcasting would
    hide it. Targets of rows that were padded are left out by `target_mask`; no number means that one does not count.
    `losses`: weights of other losses that the model returns.
    """

    unit = "samples"
    uses_target_mask: Literal[True] = True

    def __init__(self, losses: Mapping[str, float] | None = None, together: int | None = None) -> None:
        self._losses = losses or {}

    def count(self, batch: Batch) -> int:
        targets, mask = batch["targets"], batch.get("target_mask")
        return int(targets.numel() if mask is None else mask.sum() * (targets.numel() // mask.numel()))

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        predicted, targets = logits_of(outputs, self._losses), batch["targets"]
        if targets.is_complex():
            raise WordsError(
                "objective=regression: the targets are complex. Give their parts as two real numbers each."
            )
        if predicted.shape != targets.shape:
            if [size for size in predicted.shape if size > 1] != [size for size in targets.shape if size > 1]:
                raise WordsError(
                    f"objective=regression: the model returns {list(predicted.shape)}, but the targets are "
                    f"{list(targets.shape)}."
                )
            predicted = predicted.view_as(targets)
        predicted, targets, count = predicted.float(), targets.float(), targets.numel()
        if "target_mask" in batch:
            mask = batch["target_mask"].view(*batch["target_mask"].shape, *[1] * (targets.ndim - 2))
            predicted, targets = (torch.where(mask, each, 0.0) for each in (predicted, targets))
            count = mask.sum() * (targets.numel() // mask.numel())
        loss = Loss(F.mse_loss(predicted, targets, reduction="sum"))
        return add_losses(loss, outputs, self._losses, count)
