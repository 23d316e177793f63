"""What begins after the first step ends the run, is kept over a restart, or is told."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from invariance.losses import CLASSES, OfClasses
from invariance.test_losses import asked, launch
from pool import RankFailed, resident
from torch import Tensor, nn

from dtrain.objective import Loss
from dtrain.train import train

BEGIN = 5
"""The forward from which a model does something else."""


class Base(nn.Module):
    """A model of the rows of `invariance.losses`, which counts its training forwards in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.make()

    def make(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        return self.head(self.mix(self.layers(x)))  # type: ignore[no-any-return]

    def mix(self, x: Tensor) -> Tensor:
        return x


class FrozenOnce(Base):
    """Freezes a layer in one forward, for good."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.count == 2:
            self.layers.requires_grad_(False)
        return super().forward(x)


class FrozenAfterUse(Base):
    def mix(self, x: Tensor) -> Tensor:
        self.layers.requires_grad_(bool(self.count < 3))
        return x


class UnfrozenByMode(Base):
    """Its `train` unfreezes a layer after the first evaluation."""

    def make(self) -> None:
        self.calls = 0
        self.head.requires_grad_(False)

    def train(self, mode: bool = True) -> "UnfrozenByMode":
        self.calls += mode
        self.head.requires_grad_(self.calls > 1)
        return super().train(mode)


class Late(Base):
    """From forward `BEGIN` on its state changes, its BatchNorm is in training mode, and it draws."""

    def make(self) -> None:
        self.seen = 0
        self.norm = nn.BatchNorm1d(8).eval()
        self.register_buffer("range", torch.zeros(8))
        self.register_buffer("cache", torch.zeros(8), persistent=False)

    def train(self, mode: bool = True) -> "Late":
        super().train(mode)
        self.norm.train(mode and bool(self.count >= BEGIN))
        return self

    def mix(self, x: Tensor) -> Tensor:
        if self.count >= BEGIN:
            self.seen += 1
            self.norm.train()
            with torch.no_grad():
                self.range.copy_(x.mean(0))
                self.cache.add_(x.mean(0))
            x = x + 0.01 * torch.randn_like(x)
        return self.norm(x)  # type: ignore[no-any-return]


class Turning(OfClasses):
    """Is no sum, and keeps a mean, from its fifth step on."""

    def __init__(self) -> None:
        super().__init__()
        self._calls, self._mean = torch.zeros(()), 0.0

    def loss(self, outputs: Tensor, batch: Any) -> Loss:
        loss = super().loss(outputs, batch)
        self._calls = self._calls + 1
        if self._calls < BEGIN:
            return loss
        self._mean += loss.sum.item()
        return Loss(F.cross_entropy(outputs, batch["targets"], weight=self._weights) + outputs.std(0).sum())


def words_of(model: type[nn.Module], *words: str) -> tuple[str, ...]:
    objective = "objective._target_=invariance.losses.OfClasses"
    return f"model._target_=loop.test_watch.{model.__name__} trust=[invariance,loop]", objective, *words


@pytest.mark.parametrize("mesh", ["devices=1", "devices=2 strategy=fsdp"])
def test_a_layer_that_train_unfreezes_ends_the_run_before_it_is_saved(mesh: str, tmp_path: Path) -> None:
    evaluated = "data.holdout_dataset._target_=invariance.losses.Rows evaluate.every=3 checkpoint.every=7 steps=7"
    made = asked(*words_of(UnfrozenByMode, evaluated, mesh, f"out={tmp_path / 'run'}"))
    with pytest.raises(RankFailed, match=r"WordsError: model: head\.weight was frozen when the model was built"):
        resident(made.world, train, made)
    assert not [*(tmp_path / "run").rglob("commit.json")]


@pytest.mark.parametrize("mesh", ["devices=1", "devices=2 strategy=ddp"])
def test_a_layer_that_was_frozen_while_it_trained_is_frozen_after_a_restart(mesh: str, tmp_path: Path) -> None:
    whole = launch(tmp_path / "whole", *words_of(FrozenOnce, mesh, "steps=6"))
    launch(tmp_path / "parts", *words_of(FrozenOnce, mesh, "steps=4"))
    parts = launch(tmp_path / "parts", *words_of(FrozenOnce, mesh, "steps=6"))
    assert [row["loss"] for row in parts["rows"]] == pytest.approx([row["loss"] for row in whole["rows"]], rel=1e-7)


def test_freezing_a_layer_that_was_used_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"WordsError: strategy: the forward freezes layers\.0\.weight after it has"):
        launch(tmp_path, *words_of(FrozenAfterUse, "devices=2 strategy=ddp steps=4"))


def test_what_begins_later_is_told(tmp_path: Path) -> None:
    words = words_of(Late, "devices=1 steps=20 objective._target_=loop.test_watch.Turning")
    told = launch(tmp_path, *words)["caveats"]
    for sentence in (
        r"BatchNorm1d sees one microbatch",
        r"range: training changes these buffers",
        r"cache is a buffer with persistent=False",
        r"seen is a number that every step changes",
        r"the forward draws random numbers \(of torch\)",
        r"_mean of the objective changes with every step",
        r"objective Turning: the loss of some samples is",
    ):
        assert sum(bool(re.match(sentence, text)) for text in told) == 1, (sentence, told)


def test_a_loss_that_becomes_no_sum_ends_a_run_of_several_ranks(tmp_path: Path) -> None:
    words = words_of(Base, "devices=2 strategy=ddp steps=20 objective._target_=loop.test_watch.Turning")
    with pytest.raises(RankFailed, match="WordsError: objective Turning: the loss of some samples is"):
        launch(tmp_path, *words)
