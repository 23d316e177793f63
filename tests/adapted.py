"""Adapters for tests: a base whose matrices are all filled, and training on every mesh against one process and peft."""

from functools import partial
from typing import Any

import peft
import torch
from pool import resident
from small import PARTS, STRATEGIES, agree, few_steps, joined, small_gpt, tokens
from torch import nn

from dtrain.adapter import merged
from dtrain.build import build
from dtrain.model.gpt import GPT
from dtrain.model.seeds import fill_added

TARGETS = ["q", "k", "v", "out", "up", "down"]
DDP = {"_target_": "dtrain.strategy.ddp.DDP", "bucket_mb": 25}
MESHES: dict[str, tuple[Any, dict[str, int]]] = {
    "ddp 2": (DDP, {"dp_replicate": 2}),
    "fsdp 2": (STRATEGIES["fsdp"], {"dp_shard": 2}),
    "tp 2": (DDP, {"tp": 2}),
    "pp 2": (DDP, {"pp": 2}),
}
MORE: dict[str, tuple[Any, dict[str, int]]] = {
    "fsdp 2 x tp 2": (STRATEGIES["fsdp"], {"dp_shard": 2, "tp": 2}),
    "ddp 2 x pp 2": (DDP, {"dp_replicate": 2, "pp": 2}),
}


def filled(**arguments: Any) -> nn.Module:
    """A GPT in which no matrix is zero, as trained ones are not."""
    model = GPT(**arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def part(word: str, **changed: Any) -> dict[str, Any]:
    """The adapter of a word."""
    return {
        "_target_": f"dtrain.adapter.{word}.build",
        "targets": TARGETS,
        "rank": 4,
        "alpha": 8,
        "dropout": 0.0,
        **changed,
    }


def parts_of(word: str, **changed: Any) -> dict[str, Any]:
    return PARTS | {
        "model": PARTS["model"] | {"_target_": "adapted.filled", "tied": False},
        "adapter": part(word, **changed),
    }


def steps_of(word: str, mesh: tuple[Any, dict[str, int]], *, steps: int, **changed: Any) -> dict[str, Any]:
    """The run of `few_steps` on a mesh."""
    strategy, degrees = mesh
    world = 1
    for degree in degrees.values():
        world *= degree
    parts, microbatch = parts_of(word, **changed) | {"strategy": strategy}, 8 // world if "pp" in degrees else 4
    runs = resident(world, partial(few_steps, parts, degrees, steps=steps, microbatch=microbatch))
    return joined(runs[:: degrees.get("dp_replicate", 1)]) if "pp" in degrees else runs[0]  # of one replica


def trains_alike(word: str, mesh: tuple[Any, dict[str, int]], one: dict[str, Any]) -> None:
    """20 steps on a mesh have the losses, norms and weights of one process, within 2e-6."""
    run = steps_of(word, mesh, steps=20)
    agree(run, one, tolerance=2e-6)
    assert run["gradients"].keys() == one["gradients"].keys()


def beside_peft(word: str) -> tuple[nn.Module, nn.Module]:
    """A model with an adapter of ours, and one with peft's, of the same numbers."""
    ours, plain = small_gpt(), small_gpt()
    build(part(word))(ours)
    fill_added(ours, 1)
    named = {name: each for name, each in ours.named_modules() if hasattr(each, "begin")}
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in named.values():
            layer.begin()
            layer.lora_B.normal_(generator=generator)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(named), use_dora=word == "dora")
    theirs = peft.get_peft_model(plain, config)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, layer in named.items():
            there = theirs.base_model.model.get_submodule(name)
            there.lora_A.default.weight.copy_(layer.lora_A)
            there.lora_B.default.weight.copy_(layer.lora_B)
            if word == "dora":
                assert torch.equal(there.lora_magnitude_vector.default.weight, layer.magnitude), (
                    "both begin with the lengths of W"
                )
                layer.magnitude.mul_(1.25)
                there.lora_magnitude_vector.default.weight.copy_(layer.magnitude)
    return ours, theirs


def computes_as_peft(word: str) -> None:
    """Outputs and gradients are those of peft."""
    ours, theirs = beside_peft(word)
    for model in (ours, theirs):
        model(tokens(2, 6)).square().mean().backward()
    torch.testing.assert_close(ours(tokens(2, 6)), theirs(tokens(2, 6)), rtol=1e-5, atol=1e-6)
    there = {name: each.grad for name, each in theirs.named_parameters() if each.grad is not None}
    here = {name: each.grad for name, each in ours.named_parameters() if each.grad is not None}
    assert len(here) == len(there)
    for name, gradient in here.items():
        own = name.replace("magnitude", "lora_magnitude_vector")
        torch.testing.assert_close(gradient, there[f"base_model.model.{own}.default.weight"], rtol=1e-4, atol=1e-6)


def merges_as_peft(word: str) -> None:
    """To the last bit."""
    ours, theirs = beside_peft(word)
    mine = {
        name: merged(layer.weight, {each: getattr(layer, each) for each in layer.added}, layer.scaling)
        for name, layer in ours.named_modules()
        if hasattr(layer, "added")
    }
    whole = theirs.merge_and_unload()  # type: ignore[operator]
    assert len(mine) == 2 * len(TARGETS)
    assert all(torch.equal(whole.get_submodule(name).weight, weight) for name, weight in mine.items())
