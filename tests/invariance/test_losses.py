"""An objective of the user's own trains as a plain loop does, on every mesh, or is refused with the reason."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from invariance.losses import ODD, SAMPLES, WEIGHTS, by_hand
from invariance.run import _rank
from pool import RankFailed, resident
from small import plan
from torch import Tensor

from dtrain.planned import Plan

WORDS = (
    "model._target_=invariance.losses.net", "data=dataset", "data.dataset._target_=invariance.losses.Rows", "data.holdout=0", "trust=[invariance]",
    f"batch={SAMPLES}", "optim=sgd", "optim.lr=0.5", "optim.momentum=0", "optim.nesterov=false", "optim.weight_decay=0", "clip=null",
    "schedule=constant", "schedule.warmup=0", "logger=[]", "hook=[]", "seed=3",
)  # fmt: skip
MESHES = ("devices=1", "devices=1 microbatch=2", "devices=2 strategy=ddp", "devices=2 strategy=fsdp microbatch=4")


def asked(*words: str) -> Plan:
    return plan(*WORDS, *(part for each in words for part in each.split()))


def train(*words: str, steps: int = 3) -> dict[str, Any]:
    made = asked(*words)
    return resident(made.world, _rank, made, steps)[0]


def check(here: dict[str, Any], there: dict[str, Any]) -> None:
    assert here["losses"] == pytest.approx(there["losses"], rel=2e-6)
    for name, value in there["weights"].items():
        torch.testing.assert_close(torch.tensor(here["weights"][name]), torch.tensor(value), rtol=2e-6, atol=2e-6)


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, weight=torch.tensor(WEIGHTS))


OF_CLASSES = "objective._target_=invariance.losses.OfClasses"
CLASSIFICATION = f"objective=classification objective.weights=[{','.join(map(str, WEIGHTS))}]"


@pytest.mark.parametrize("objective", [OF_CLASSES, CLASSIFICATION])
def test_a_weighted_mean_is_that_of_torch_on_every_mesh(objective: str) -> None:
    expected = by_hand(weighted, steps=3, lr=0.5, seed=3)
    for mesh in MESHES:
        check(train(objective, mesh), expected)


@pytest.mark.parametrize("count", [*ODD])
def test_a_count_that_divides_nothing_is_refused(count: str) -> None:
    with pytest.raises(RankFailed, match=r"objective Miscounted: its count returned .*\. Let it return"):
        train("objective._target_=invariance.losses.Miscounted", f"objective.answer={count}", "devices=1", steps=1)
