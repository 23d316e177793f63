"""dora: trains the same on every mesh, computes and differentiates what peft's does, and merges to the same bits."""

from functools import cache
from typing import Any

import pytest
import torch
from adapted import MESHES, MORE, TARGETS, beside_peft, part, parts_of, trains_alike
from small import few_steps, tokens
from torch import nn

from dtrain.adapter import merged
from dtrain.build import build

one = cache(lambda: few_steps(parts_of("dora"), {}, steps=20))


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
    def check(ours: nn.Module, theirs: nn.Module) -> None:
        for model in (ours, theirs):
            model(tokens(2, 6)).square().mean().backward()
        torch.testing.assert_close(ours(tokens(2, 6)), theirs(tokens(2, 6)), rtol=1e-5, atol=1e-6)
        there = {name: each.grad for name, each in theirs.named_parameters() if each.grad is not None}
        here = {name: each.grad for name, each in ours.named_parameters() if each.grad is not None}
        assert len(here) == len(there)
        for name, gradient in here.items():
            own = name.replace("magnitude", "lora_magnitude_vector")
            torch.testing.assert_close(gradient, there[f"base_model.model.{own}.default.weight"], rtol=1e-4, atol=1e-6)

    beside_peft("dora", check)


def test_it_merges_to_the_bits_of_peft() -> None:
    def check(ours: nn.Module, theirs: nn.Module) -> None:
        mine = {
            name: merged(layer.weight, {each: getattr(layer, each) for each in layer.added}, layer.scaling)
            for name, layer in ours.named_modules()
            if hasattr(layer, "added")
        }
        whole = theirs.merge_and_unload()
        assert len(mine) == 2 * len(TARGETS)
        assert all(torch.equal(whole.get_submodule(name).weight, weight) for name, weight in mine.items())

    beside_peft("dora", check)


def test_a_row_of_zeros_stays_one() -> None:
    layer = nn.Sequential(nn.Linear(3, 2))
    nn.init.zeros_(layer[0].weight)
    build(part("dora", targets=["0"]))(layer)
    layer[0].begin()
    assert torch.equal(layer(torch.ones(1, 3)), layer[0].bias[None])
