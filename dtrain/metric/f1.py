"""F1: the harmonic mean of precision and recall."""

from typing import ClassVar

from torch import Tensor

from dtrain.metric import counts


class F1:
    """Of two classes that of class 1; of more the mean over the classes that occur, among targets or predictions
    (macro), as in sklearn. A class that is never predicted rightly has 0.
    """

    rows: ClassVar[bool] = False

    def part(self, scores: Tensor, targets: Tensor) -> Tensor:
        return counts(scores, targets)

    def value(self, whole: Tensor) -> float:
        right, predicted, true = whole[:, 1:] if whole.shape[1] == 2 else whole
        occurs = predicted + true > 0
        each = 2 * right[occurs] / (predicted + true)[occurs]
        if not len(each):
            return 0.0 if whole.sum() else float("nan")
        return float(each.mean())
