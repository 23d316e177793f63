"""Mean squared error over all outputs."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from dtrain.data import Batch
from dtrain.errors import WordsError
from dtrain.objective import Loss, add_losses, logits_of


class Regression:
    """Outputs and targets have the same shape, dims of size 1 aside. Raises WordsError otherwise: broadcasting would
    hide it. `losses`: weights of other losses that the model returns.
    """

    unit = "samples"

    def __init__(self, losses: Mapping[str, float] | None = None, together: int | None = None) -> None:
        self._losses = losses or {}

    def count(self, batch: Batch) -> int:
        return int(batch["targets"].numel())

    def inputs(self, batch: Batch) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        predicted, targets = logits_of(outputs, self._losses), batch["targets"]
        if predicted.shape != targets.shape:
            if [size for size in predicted.shape if size > 1] != [size for size in targets.shape if size > 1]:
                raise WordsError(
                    f"objective=regression: the model returns {list(predicted.shape)}, but the targets are "
                    f"{list(targets.shape)}."
                )
            predicted = predicted.view_as(targets)
        loss = Loss(F.mse_loss(predicted.float(), targets.float(), reduction="sum"))
        return add_losses(loss, outputs, self._losses, targets.numel())
