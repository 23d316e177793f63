"""Precision, recall and F1 of each class, as in sklearn's classification_report."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from dtrain.metric import counts


class PerClass:
    """`eval_per_class_recall_cat`: by the names of the classes, else by their numbers. What divides by 0 is 0."""

    rows: ClassVar[bool] = False

    def part(self, scores: Tensor, targets: Tensor) -> Tensor:
        return counts(scores, targets)

    def value(self, whole: Tensor) -> Mapping[str, Tensor]:
        """Three figures [classes]; nan without samples."""
        right, predicted, true = whole if whole.sum() else whole / 0
        of = {"precision": predicted, "recall": true, "f1": (predicted + true) / 2}
        return {name: right / total.clamp(min=0.5) for name, total in of.items()}
