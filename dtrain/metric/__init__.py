"""Metrics of held-out data beside the loss. A metric returns numbers that are added up over microbatches and ranks, or
rows that are put together, so its value is that of all samples at once on every mesh.
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from dtrain.objective import check_targets


class Metric(Protocol):
    """A class of the user's own states `about = {"figures": {"eval_<name>": "highest"}}`, or `lowest`."""

    rows: ClassVar[bool]
    """Whether `part` returns rows to put together, not numbers to add up."""

    def part(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The part of some samples: of `scores` [N, classes], the logits, and `targets` [N]; N may be 0. Where the
        targets are numbers to predict, both have the shape of the targets.
        """
        ...

    def value(self, whole: Tensor) -> float | Mapping[str, Tensor]:
        """The figure, of the sum of all parts in fp64, or of all rows; or names with a figure [classes] for each class,
        of sums alone.
        """
        ...


class Hits:
    """The share of targets that are among the `most` highest scores."""

    rows: ClassVar[bool] = False

    def __init__(self, most: int) -> None:
        self._most = most

    def part(self, scores: Tensor, targets: Tensor) -> Tensor:
        """[hits, samples]."""
        best = scores.topk(self._most, dim=1).indices if self._most > 1 else scores.argmax(1, keepdim=True)
        hits = (best == targets[:, None]).sum()
        return torch.stack([hits, hits.new_tensor(len(targets))])

    def value(self, whole: Tensor) -> float:
        hits, samples = whole.tolist()
        return float(hits / samples) if samples else float("nan")


def counts(scores: Tensor, targets: Tensor) -> Tensor:
    """For each class how often it was rightly predicted, predicted, and true: [3, classes]. Raises WordsError for a
    target that is no class.
    """
    classes, predicted = scores.shape[1], scores.argmax(1)
    check_targets(targets, classes)
    each = (targets[predicted == targets], predicted, targets)
    return torch.stack([torch.bincount(labels, minlength=classes) for labels in each])
