"""dora: trains the same on every mesh, computes and differentiates what peft's does, and merges to the same bits."""

from functools import cache
from typing import Any

import pytest
import torch
from adapted import MESHES, MORE, TARGETS, computes_as_peft, merges_as_peft, part, parts_of, trains_alike
from small import few_steps
from torch import nn

from dtrain.build import build

one = cache(lambda: few_steps(parts_of("dora"), {}, steps=20))


@pytest.mark.often("fsdp 2", "pp 2")  # MORE has the others
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_it_trains_alike_on_every_mesh(mesh: Any) -> None:
    trains_alike("dora", mesh, one())


@pytest.mark.campaign("8 ranks")
@pytest.mark.parametrize("mesh", MORE.values(), ids=MORE)
def test_it_trains_alike_on_meshes_of_four(mesh: Any) -> None:
    trains_alike("dora", mesh, one())


def test_nothing_else_is_trained() -> None:
    run, begun = one(), few_steps(parts_of("dora"), {}, steps=0)
    assert {name.rpartition(".")[2] for name in run["gradients"]} == {"lora_A", "lora_B", "magnitude"}
    assert {name.split(".")[-2] for name in run["gradients"]} == set(TARGETS)
    moved = {name for name in run["weights"] if run["weights"][name] != begun["weights"][name]}
    assert moved == run["gradients"].keys()


def test_outputs_and_gradients_are_those_of_peft() -> None:
    computes_as_peft("dora")


def test_it_merges_to_the_bits_of_peft() -> None:
    merges_as_peft("dora")


def test_a_row_of_zeros_stays_one() -> None:
    layer = nn.Sequential(nn.Linear(3, 2))
    nn.init.zeros_(layer[0].weight)
    build(part("dora", targets=["0"]))(layer)
    layer[0].begin()
    assert torch.equal(layer(torch.ones(1, 3)), layer[0].bias[None])
