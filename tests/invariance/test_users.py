"""Models as users write them: one process against a loop of plain torch, and every layout against that loop, or refused before its first step.

`slow`: the whole table.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from invariance.plain import loop
from invariance.run import COMMON, run
from invariance.users import TASKS, USERS, Samples, slow_first, words_of
from pool import RankFailed, ranks
from torch import Tensor, nn

from dtrain.backend.gloo import Gloo
from dtrain.data import IGNORE
from dtrain.errors import WordsError

STEPS, LR = 4, 1e-3
LAYOUTS = {
    "single": "devices=1",
    "microbatches": "devices=1 microbatch=2",
    "ddp": "strategy=ddp devices=2 microbatch=2",
    "fsdp": "strategy=fsdp devices=2 microbatch=2",
    "zero1": "strategy=zero1 devices=2 microbatch=2",
    "zero2": "strategy=zero2 devices=2 microbatch=2",
}
FAST = (
    "one_embedding_for_three-fsdp", "weight_norm-zero1", "lstm_over_packed_rows-ddp", "frozen_backbone-fsdp", "built_in_eval-single", "merging-fsdp",
    "attribute_of_a_parameter-zero1", "maml-ddp", "branches-fsdp", "functional_call-fsdp", "hook_on_a_gradient-fsdp", "weight_in_a_closure-fsdp",
    "data_clamped-fsdp", "teacher_in_parameters-zero1", "bias_of_a_batch-ddp", "replaced_in_forward-single", "gradient_penalty-fsdp", "frozen_at_first-ddp",
    "frozen_for_one_use-fsdp", "scripted_part-zero1", "class_of_parameters-fsdp", "embedding_with_max_norm-ddp",
    "tied_by_data-fsdp", "clamped_later-zero1", "scaled_once-fsdp", "unfrozen_in_forward-single", "unsaved_layer-single", "unfrozen_later-ddp", "unfrozen_later-fsdp", "frozen_later-zero1", "frozen_later-ddp", "bias_of_a_batch_later-ddp",
    "lists_some_parameters-ddp", "lists_without_arguments-single", "lists_once-fsdp", "lists_once-ddp",
)  # fmt: skip
"""Run on every change."""


@cache
def by_hand(name: str, words: str) -> dict[str, Any]:
    return ranks(2 if "devices=2" in words else 1, _by_hand, name, words)[0]  # type: ignore[no-any-return]


def _by_hand(name: str, words: str) -> dict[str, Any]:
    task, is_own = TASKS[USERS[name].task], "own" in TASKS[USERS[name].task].words

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        if "slow_first" in USERS[name].words:
            return slow_first(model=model, lr=LR)
        trained = [p for p in model.parameters() if p.requires_grad or name == "frozen_at_first"]
        return torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        given = {"x": batch["x"]} if "[x]" in USERS[name].words else batch["x"]
        more = {"labels": batch["y"]} if is_own else {}
        outputs = model(**given, **more) if isinstance(given, dict) else model(given, **more)
        return task.loss(outputs, batch["y"])

    with Gloo(timeout=60).open():
        return loop(
            USERS[name].make, _words(name, words), steps=STEPS, sample=Samples(task=USERS[name].task).__getitem__, loss_of=loss, optimizer_of=optimizer_of,
            count=lambda batch: int(batch["y"].ne(IGNORE).sum()) if USERS[name].task == "tokens" else len(batch["y"]),
            unused=USERS[name].unused,
        )  # fmt: skip


def _words(name: str, words: str) -> list[str]:
    return [*words_of(name).split(), *COMMON.split(), *words.split()]


def apart(here: dict[str, Any], there: dict[str, Any]) -> dict[str, float]:
    floor = 0.02 * max(float(torch.tensor(value).abs().max()) for value in there["gradients"].values())
    found = {"losses": max(abs(a - b) / abs(b) for a, b in zip(here["losses"], there["losses"], strict=True))}
    for part, least in (("gradients", floor), ("weights", LR * STEPS)):
        assert here[part].keys() == there[part].keys()
        pairs = ((name, torch.tensor(here[part][name]), torch.tensor(value)) for name, value in there[part].items())
        found |= {
            f"{part} {name}": float((a - b).abs().max()) / max(least, float(b.abs().max())) for name, a, b in pairs
        }
    return found


@pytest.mark.often(*FAST)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", USERS)
def test_a_model_trains_as_by_hand_or_is_refused(name: str, layout: str) -> None:
    refused = USERS[name].refused
    if said := refused.get("", refused.get(layout)):
        with pytest.raises((WordsError, RankFailed), match=re.escape(said)) as error:
            run(words_of(name), LAYOUTS[layout], steps=STEPS)
        assert isinstance(error.value, WordsError) or "dtrain.errors.WordsError" in str(error.value), error.value
        return
    strategy, _, rest = LAYOUTS[layout].partition("devices")
    alone = f"{'strategy=ddp ' if strategy else ''}devices{rest}"
    found = apart(run(words_of(name), LAYOUTS[layout], steps=STEPS), by_hand(name, alone))
    user = USERS[name]
    assert {what: far for what, far in found.items() if far > (user.weights if "weights" in what else user.same)} == {}
