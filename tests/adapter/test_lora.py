"""lora: trains the same on every mesh, computes and differentiates what peft's does, and merges to the same bits."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from adapted import MESHES, MORE, TARGETS, computes_as_peft, merges_as_peft, part, parts_of, steps_of, trains_alike
from pool import resident
from small import agree, few_steps, small_gpt, tokens
from torch import nn

from dtrain.build import build
from dtrain.errors import WordsError
from dtrain.model import caveats
from dtrain.model.adapted import adapter_of, added

MODEL = parts_of("lora")["model"]
one = cache(lambda: few_steps(parts_of("lora"), {}, steps=20))


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_it_trains_alike_on_every_mesh(mesh: Any) -> None:
    trains_alike("lora", mesh, one())


@pytest.mark.campaign("8 ranks")
@pytest.mark.parametrize("mesh", MORE.values(), ids=MORE)
def test_it_trains_alike_on_meshes_of_four(mesh: Any) -> None:
    trains_alike("lora", mesh, one())


def test_nothing_else_is_trained() -> None:
    run, begun = one(), few_steps(parts_of("lora"), {}, steps=0)
    assert {name.rpartition(".")[2] for name in run["gradients"]} == {"lora_A", "lora_B"}
    assert {name.split(".")[-2] for name in run["gradients"]} == set(TARGETS)
    moved = {name for name in run["weights"] if run["weights"][name] != begun["weights"][name]}
    assert moved == run["gradients"].keys()


def test_outputs_and_gradients_are_those_of_peft() -> None:
    computes_as_peft("lora")


def test_it_merges_to_the_bits_of_peft() -> None:
    merges_as_peft("lora")


def test_names_stay_and_none_of_a_layer_is_lost() -> None:
    model = small_gpt()
    before = dict(model.named_parameters())
    build(part("lora", targets=["attention.q"]))(model)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert set(after) - set(before) == set(added(model))
    assert set(added(model)) == {f"blocks.{i}.attention.q.lora_{each}" for i in (0, 1) for each in "AB"}
    assert adapter_of(model) == {"kind": "lora", "rank": 4, "alpha": 8, "dropout": 0.0}


def test_without_targets_it_is_every_linear_layer_of_the_blocks() -> None:
    model = small_gpt()
    build(part("lora", targets=None))(model)
    assert {name.split(".")[-2] for name in added(model)} == {*TARGETS, "gate"}
    with pytest.raises(WordsError, match=r"adapter=lora: the model has no linear layer. Type adapter=none\."):
        build(part("lora", targets=None))(nn.Sequential(nn.Conv2d(1, 1, 1)))


def test_a_pattern_without_a_layer_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        WordsError,
        match=r"adapter.targets: no linear layer of the model fits q_proj.*They are .*blocks.\*.attention.q, ",
    ):
        build(part("lora", targets=["q", "q_proj"]))(small_gpt())
    with pytest.raises(WordsError, match=r"fits embed\."):
        build(part("lora", targets=["embed"]))(small_gpt())


@pytest.mark.parametrize("mesh", ["ddp 2", "tp 2"])
def test_dropout_is_that_of_its_rank_and_step(mesh: str) -> None:
    run, again = (steps_of("lora", MESHES[mesh], steps=4, dropout=0.5) for _ in range(2))
    assert run["losses"] == again["losses"] != one()["losses"][:4]
    model = small_gpt()
    build(part("lora", dropout=0.5))(model)
    assert any("dropout draws other masks" in sentence for sentence in caveats(model))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    assert not torch.equal(model(tokens(1, 4)), model(tokens(1, 4)))
    assert torch.equal(model.eval()(tokens(1, 4)), model(tokens(1, 4)))


TIED = parts_of("lora", targets=["head", "q"]) | {"model": MODEL | {"tied": True}}


@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2"])
def test_a_head_that_is_tied_to_the_embedding_trains_alike(mesh: str) -> None:
    strategy, degrees = MESHES[mesh]
    run = resident(2, partial(few_steps, TIED | {"strategy": strategy}, degrees, steps=20, microbatch=4))[0]
    agree(run, few_steps(TIED, {}, steps=20), tolerance=2e-6)
    assert "head.lora_B" in run["gradients"] and "embed.weight" not in run["gradients"]
