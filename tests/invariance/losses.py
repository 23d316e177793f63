"""Objectives as users write them, a model and rows for them, and the same training as a plain loop."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.model import construct
from dtrain.model.seeds import derive
from dtrain.objective import Loss

WEIGHTS = (0.3, 0.9, 1.7)
SAMPLES, CLASSES = 16, 3


ODD = {"negative": -3, "no_number": math.nan, "infinite": math.inf, "none": None, "text": "3"}


class Rows:
    """Features [6] and a class; every fifth target does not count."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return features, torch.tensor(-100 if index % 5 == 4 else index % CLASSES)


class Unlabelled(Rows):
    """The same, and no target counts but those of the samples from `first` on."""

    def __init__(self, first: int = SAMPLES) -> None:
        self._first = first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, target = super().__getitem__(index)
        return features, target if index >= self._first else torch.tensor(-100)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


class OfClasses:
    """Cross entropy whose count is the sum of the classes' weights, which is no whole number."""

    unit = "samples"

    def __init__(self) -> None:
        self._weights = torch.tensor(WEIGHTS)

    def count(self, batch: Any) -> Any:
        targets = batch["targets"]
        return float(self._weights[targets[targets != -100]].sum())

    def inputs(self, batch: Any) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss(F.cross_entropy(outputs, batch["targets"], weight=self._weights, reduction="sum"))


class Miscounted(OfClasses):
    def __init__(self, answer: str) -> None:
        super().__init__()
        self._answer = ODD[answer]

    def count(self, batch: Any) -> Any:
        return self._answer


def by_hand(
    loss_of: Callable[[Any, Tensor], Tensor], *, steps: int, lr: float, seed: int, model: str = "net"
) -> dict[str, Any]:
    """Steps of SGD on all rows at once: their losses, and the weights afterwards."""
    model = construct({"_target_": f"invariance.losses.{model}"}, facts={}, seed=derive(seed, "model"))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr), []
    inputs, targets = (torch.stack(column) for column in zip(*map(Rows().__getitem__, range(SAMPLES)), strict=True))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: each.tolist() for name, each in model.named_parameters()}}


class Judging(nn.Module):
    """Returns its own mean, which is nan where no target of the microbatch counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), labels)


class Margin(nn.Module):
    """A head as in ArcFace: cosines to a vector of each class."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.ones(CLASSES, CLASSES))


class Learning(OfClasses):
    """An objective with a head; `frozen` is nobody's to train."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self._parts = {"head": Margin().requires_grad_(not frozen)}
        self._mean = torch.zeros(CLASSES)

    def loss(self, outputs: Any, batch: Any) -> Loss:
        self._mean = self._mean.lerp(outputs.detach().mean(0), 0.1)
        return super().loss(outputs @ self._parts["head"].centres, batch)


class Uncertain(nn.Module):
    """Beside its logits it returns what the loss needs of a parameter: log-variances (arXiv 1705.07115)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.log_variances = net(), nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layers(x), "log_variances": self.log_variances * 1}


class OfTasks(OfClasses):
    """Cross entropy and the size of the logits, weighed by the model's log-variances."""

    def count(self, batch: Any) -> int:
        return len(batch["targets"])

    def loss(self, outputs: Any, batch: Any) -> Loss:
        logits, log_variances = outputs["logits"], outputs["log_variances"]
        tasks = F.cross_entropy(logits, batch["targets"], reduction="sum"), logits.square().sum()
        terms = (
            task * (-each).exp() + each * len(logits) for task, each in zip(tasks, log_variances.unbind(), strict=True)
        )
        return Loss(torch.stack([*terms]).sum())


class Own:
    """An objective whose loss is a mean over the samples of a microbatch."""

    unit = "samples"

    def __init__(self, together: int | None = None) -> None:
        pass

    def count(self, batch: Any) -> int:
        return len(batch["targets"])

    def inputs(self, batch: Any) -> Any:
        return batch["inputs"]

    def loss(self, outputs: Any, batch: Any) -> Loss:
        return Loss(self.mean(outputs, batch["targets"]) * len(batch["targets"]))

    def mean(self, outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets.clamp(min=0))


class Contrastive(Own):
    """Samples of one class attract each other (arXiv 2004.11362)."""

    def mean(self, outputs: Any, targets: Tensor) -> Tensor:
        vectors = F.normalize(outputs)
        likeness = (vectors @ vectors.T / 0.5).fill_diagonal_(-1e9).log_softmax(1)
        alike = (targets[:, None] == targets) & ~torch.eye(len(targets), dtype=torch.bool)
        return -(likeness * alike).sum(1).div(alike.sum(1).clamp(min=1)).mean()


class Triplets(Own):
    def mean(self, outputs: Any, targets: Tensor) -> Tensor:
        distances = torch.cdist(outputs, outputs)
        same = targets[:, None] == targets
        return (distances.where(same, 0).amax(1) - distances.where(~same, 99).amin(1) + 1).relu().mean()


class Correlation(Own):
    def mean(self, outputs: Any, targets: Tensor) -> Tensor:
        pair = torch.stack((outputs[:, 0], targets.float()))
        return 1 - torch.corrcoef(pair)[0, 1]


class Normalised(Own):
    def mean(self, outputs: Any, targets: Tensor) -> Tensor:
        return ((outputs - outputs.mean(0)) / (outputs.std(0) + 1e-3)).tanh().square().mean()


class MeanOfMeans(Own):
    """Its count is not the one of its mean, which leaves out a class."""

    def mean(self, outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets.clamp(min=0), ignore_index=0)


class Stated(Contrastive):
    about: ClassVar = {"whole": True}


class Noisy(Own):
    """A sum, with noise of its own."""

    def mean(self, outputs: Any, targets: Tensor) -> Tensor:
        return super().mean(outputs + 0.1 * torch.randn_like(outputs), targets)


class Views(Own):
    """Two rows of the model for each sample, all first ones before all second ones."""

    def inputs(self, batch: Any) -> Any:
        return torch.cat((batch["inputs"], -batch["inputs"]))

    def mean(self, outputs: Any, targets: Tensor) -> Tensor:
        first, second = outputs.chunk(2)
        return F.mse_loss(first, second) + F.cross_entropy(second, targets.clamp(min=0))


class Signed(Own):
    """Terms of both signs, which all but cancel."""

    def mean(self, outputs: Any, targets: Tensor) -> Tensor:
        return ((outputs.sum(1) * 1e-4 + 100) * targets.clamp(-1, 1).sub(0.3)).mean()


class Centred(Own):
    """A sum that subtracts a running mean, of the batches before."""

    def __init__(self, together: int | None = None) -> None:
        self._centre = torch.zeros(CLASSES)

    def mean(self, outputs: Any, targets: Tensor) -> Tensor:
        centre, self._centre = self._centre, self._centre.lerp(outputs.detach().float().mean(0), 0.1)
        return F.cross_entropy(outputs - centre, targets.clamp(min=0))
