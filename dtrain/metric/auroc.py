"""The area under the ROC curve."""

from typing import ClassVar

import torch
from torch import Tensor

from dtrain.objective import check_targets


class AUROC:
    """Exact, from the ranks of all probabilities. Of two classes that of class 1; of more the mean over the classes
    that occur among the targets, each against the rest. nan if only one class occurs.

    Every rank holds a row of classes + 1 fp64 numbers for each sample: 88 MB for a million samples of ten classes.
    """

    rows: ClassVar[bool] = True

    def part(self, scores: Tensor, targets: Tensor) -> Tensor:
        """[N, classes + 1]: probabilities, and the target."""
        check_targets(targets, scores.shape[1])
        return torch.cat([scores.double().softmax(1), targets[:, None].double()], 1)

    def value(self, whole: Tensor) -> float:
        probabilities, targets = whole[:, :-1], whole[:, -1].long()
        classes = probabilities.shape[1]
        if len(targets.unique()) < 2:
            return float("nan")
        if classes == 2:
            return area(probabilities[:, 1], targets == 1)
        areas = [area(probabilities[:, each], targets == each) for each in range(classes) if (targets == each).any()]
        return sum(areas) / len(areas)


def area(scores: Tensor, positive: Tensor) -> float:
    """The probability that a positive sample has a higher score than a negative one; equal scores count half. `scores`
    [N], `positive` [N] of bool, with both kinds.
    """
    _, place, many = scores.unique(return_inverse=True, return_counts=True)
    twice_the_rank = (2 * many.cumsum(0) - many + 1)[place]  # integers, so that no order of adding shows
    positives = int(positive.sum())
    wins = int(twice_the_rank[positive].sum()) - positives * (positives + 1)
    return wins / (2 * positives * (len(scores) - positives))
