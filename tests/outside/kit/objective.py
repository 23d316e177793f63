"""Classification with one more metric, and a figure that is no mean."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from dtrain.data import Batch
from dtrain.objective import Loss, logits_of
from dtrain.objective.classification import Classification


class Ranked(Classification):
    about: ClassVar = {"metrics": ["accuracy", "second"], "figures": {"eval_second": "highest", "eval_error": "lowest"}}

    def loss(self, outputs: Any, batch: Batch) -> Loss:
        loss = super().loss(outputs, batch)
        best = logits_of(outputs).detach().topk(2, dim=1).indices
        second: Tensor = (best == batch["targets"].long()[:, None]).any(1).sum()
        return Loss(loss.sum, {**loss.metrics, "second": second})

    def figures(self, sums: Mapping[str, Any], count: int) -> Mapping[str, float]:
        return {"error": 1 - float(sums["second"]) / count}
