"""Models that other people wrote: one process against a loop of plain torch, and every layout against one process, or refused before its first step.

`slow`: the whole table. torchvision and timm have rows where they can be imported.
"""

import importlib
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from invariance.foreign import FOREIGN, LAYOUTS, TASKS, Samples, build
from invariance.plain import loop
from invariance.run import COMMON, run
from pool import RankFailed, ranks
from torch import Tensor, nn

from dtrain.errors import WordsError
from dtrain.model import caveats

LOSS, GRADIENT, WEIGHT = 2e-6, 2e-6, 1e-4
STEPS, LR = 5, 1e-3
FAST = (
    ("gpt2", "tp"), ("falcon", "cp"), ("mamba", "ddp"), ("t5", "zero2"), ("deberta", "fsdp"), ("convnext", "ddp"), ("lora_llama", "fsdp"), ("gemma2", "pp"),
    ("lora_gpt2", "tp"),
)  # fmt: skip
"""Run on every change."""


@cache
def built(name: str) -> nn.Module:
    """Here, so that what it imports is in every rank that is forked. Skips where its library cannot be: torchvision and timm are built for one torch each."""
    try:
        importlib.import_module(FOREIGN[name].needs)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{FOREIGN[name].needs}: {error}")
    return build(name=name)


def apart(here: dict[str, Any], there: dict[str, Any]) -> dict[str, float]:
    """Largest relative differences: of losses to themselves, of a tensor to its largest number.

    Some gradients are all but zero, or sums that cancel (biases of keys, which softmax takes out again): they are held against a fiftieth of
    the largest gradient of the model, and weights against the way that AdamW could have gone.
    """
    floors = {
        "gradients": 0.02 * max(float(torch.tensor(value).abs().max()) for value in there["gradients"].values()),
        "weights": LR * STEPS,
    }
    differences = {"losses": max(abs(a - b) / abs(b) for a, b in zip(here["losses"], there["losses"], strict=True))}
    for part, floor in floors.items():
        assert here[part].keys() == there[part].keys()
        pairs = ((torch.tensor(here[part][name]), torch.tensor(value)) for name, value in there[part].items())
        differences[part] = max(float((a - b).abs().max()) / max(floor, float(b.abs().max())) for a, b in pairs)
    return differences


def within(differences: dict[str, float]) -> bool:
    return differences["losses"] <= LOSS and differences["gradients"] <= GRADIENT and differences["weights"] <= WEIGHT


def equal(here: dict[str, Any], there: dict[str, Any]) -> None:
    differences = apart(here, there)
    assert within(differences), differences


@cache
def one_process(name: str) -> dict[str, Any]:
    return run(FOREIGN[name].words(name), "devices=1", steps=STEPS)


def loss_of(task: str, outputs: Any, targets: Tensor) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    if "regression" in TASKS[task].words:
        return F.mse_loss(logits, targets)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def by_hand(name: str, words: str = "devices=1") -> dict[str, Any]:
    task = FOREIGN[name].task

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
        others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, betas=(0.9, 0.95), eps=1e-5)

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "targets"}
        return loss_of(task, model(**inputs) if len(inputs) > 1 else model(*inputs.values()), batch["targets"])

    return loop(
        lambda: build(name=name), [*FOREIGN[name].words(name).split(), *COMMON.split(), *words.split()], steps=STEPS,
        sample=Samples(task=task).__getitem__, loss_of=loss,
        count=lambda batch: len(batch["targets"]), optimizer_of=optimizer_of,
    )  # fmt: skip


def holds(name: str, layout: str) -> None:
    """Equal to one process, or refused by the axis that the table names.

    Where batch norms see a part of the batch the run says that numbers differ, and is equal to a loop that takes the same parts. So it is where a
    loop of plain torch that takes them rounds otherwise: its losses are those of one process all the same.
    """
    model = built(name)
    axis, words = LAYOUTS[layout]
    said = FOREIGN[name].refused.get(axis, "holds no experts of dtrain.model.moe.Experts" if axis == "ep" else None)
    if said == "BatchNorm":
        assert any(said in caveat for caveat in caveats(model))
        here = run(FOREIGN[name].words(name), words, steps=STEPS)
        equal(here, ranks(1, by_hand, name, words)[0])
        assert apart(here, one_process(name))["losses"] > LOSS
    elif said is None:
        here = run(FOREIGN[name].words(name), words, steps=STEPS)
        differences = apart(here, one_process(name))
        assert differences["losses"] <= LOSS
        if not within(differences):
            equal(here, ranks(1, by_hand, name, words)[0])
    else:
        with pytest.raises((WordsError, RankFailed), match=re.escape(said)) as refused:
            run(FOREIGN[name].words(name), words, steps=1)
        assert isinstance(refused.value, WordsError) or "dtrain.errors.WordsError" in str(refused.value), refused.value


@pytest.mark.parametrize(("name", "layout"), FAST)
def test_a_layout_of_a_foreign_model_gives_the_numbers_of_one_process(name: str, layout: str) -> None:
    holds(name, layout)


@pytest.mark.parametrize("name", ["gpt2", "bert_classifier", "t5", "lora_gpt2"])
def test_one_process_gives_the_numbers_of_a_loop_by_hand(name: str) -> None:
    built(name)
    equal(one_process(name), ranks(1, by_hand, name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_one_process_of_every_model_gives_the_numbers_of_a_loop_by_hand(name: str) -> None:
    built(name)
    equal(one_process(name), ranks(1, by_hand, name)[0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FOREIGN)
def test_every_layout_of_every_model_is_equal_or_refused(name: str, layout: str) -> None:
    holds(name, layout)


def test_there_are_forty_models_of_five_libraries() -> None:
    assert len(FOREIGN) >= 40
    assert {foreign.needs for foreign in FOREIGN.values()} == {
        "transformers",
        "diffusers",
        "peft",
        "torchvision",
        "timm",
    }
