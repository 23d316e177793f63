"""Nothing that an objective holds is left untrained, or lost at a restart, without a word."""

from pathlib import Path

import pytest
import torch
from invariance.losses import Margin, OfClasses
from invariance.test_losses import launch
from torch import nn

from dtrain.errors import WordsError
from dtrain.objective.state import check_parameters


class AModule(OfClasses, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        OfClasses.__init__(self)
        self.log_variances = nn.Parameter(torch.zeros(2))


class Holding(OfClasses):
    def __init__(self, part: object) -> None:
        super().__init__()
        self.part = part


def test_a_parameter_of_the_objective_is_refused_by_its_name() -> None:
    for objective, name in (
        (AModule(), r"log_variances \[2\]"),
        (Holding(Margin()), r"part\.centres \[3, 3\]"),
        (Holding([Holding({"head": Margin()})]), r"part\.0\.part\.head\.centres"),
        (Holding(torch.zeros(2, requires_grad=True)), "part "),
    ):
        with pytest.raises(WordsError, match=f"its parameter {name}.* Put it in the model"):
            check_parameters(objective)


def test_a_frozen_part_is_taken_and_a_running_mean_is_told(tmp_path: Path) -> None:
    words = "objective._target_=invariance.losses.Learning objective.frozen=true steps=3"
    told = launch(tmp_path, words, "devices=2 strategy=ddp")["caveats"]
    assert [text.split(" of the objective")[0] for text in told if "of the objective" in text] == ["_mean"]
