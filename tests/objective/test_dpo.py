"""dpo: the loss, rewards and gradients of TRL, and the same on every mesh."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import commands
import pytest
import torch
from adapted import MESHES, MORE
from paired import Empty, Pairs, Rows, dpo, parts_of, twenty_steps
from small import agree, few_steps, plan, small_gpt

from dtrain.build import build
from dtrain.data import Batch
from dtrain.errors import WordsError
from dtrain.objective import loss_of

one = cache(lambda adapter: few_steps(parts_of(adapter=adapter), {}, steps=20))
PAIRS = ("data=dataset", "data.dataset._target_=paired.Pairs", "data.outputs=13", "trust=[paired]")


def batch_of(dataset: Any, count: int = 4) -> Batch:
    inputs, targets = zip(*(dataset[index] for index in range(count)), strict=True)
    return {"inputs": torch.stack(inputs), "targets": torch.stack(targets)}


@pytest.mark.often("fsdp 2", "tp 2")
@pytest.mark.parametrize("mesh", ["fsdp 2", "tp 2", "pp 2"])
def test_it_trains_alike_on_every_mesh(mesh: str) -> None:
    agree(twenty_steps(parts_of(), MESHES[mesh]), one(None), tolerance=2e-6)


@pytest.mark.often("fsdp 2")
@pytest.mark.parametrize("mesh", ["ddp 2", "fsdp 2"])
def test_an_adapter_trains_alike_on_every_mesh(mesh: str) -> None:
    agree(twenty_steps(parts_of(adapter="lora"), MESHES[mesh]), one("lora"), tolerance=2e-6)


@pytest.mark.often("ddp 2-dora", "fsdp 2 x tp 2-None", "ddp 2 x pp 2-dora")
@pytest.mark.campaign("8 ranks")
@pytest.mark.parametrize("adapter", [None, "dora"])
@pytest.mark.parametrize("mesh", [*MESHES, *MORE])
def test_it_trains_alike_on_more_meshes(mesh: str, adapter: str | None) -> None:
    agree(twenty_steps(parts_of(adapter=adapter), {**MESHES, **MORE}[mesh]), one(adapter), tolerance=2e-6)


@pytest.mark.campaign("documents")
def test_loss_rewards_and_gradients_are_those_of_trl(tmp_path: Path) -> None:
    """With a frozen copy and with an adapter; conservative DPO is TRL's aot for one pair."""
    done = commands.python(str(Path(__file__).with_name("beside_trl.py")), str(tmp_path))
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == 8
    for case in cases:
        for name, value in case["theirs"].items():
            assert case["ours"][name] == pytest.approx(value, rel=1e-6, abs=1e-6), (case["case"], name)
        assert case["gradients"] < 2e-6 and case["tensors"] in (12, 21), case["case"]


def test_a_policy_that_is_the_reference_has_no_margin() -> None:
    objective, batch, model = build(dpo()), batch_of(Pairs()), small_gpt()
    logits = model(objective.inputs(batch))
    loss = loss_of(objective, logits, {**batch, "reference": objective.reference(logits, batch)})
    assert objective.count(batch) == 4
    assert loss.sum.item() == pytest.approx(4 * torch.log(torch.tensor(2.0)).item())
    assert all(value.item() == 0 for value in loss.metrics.values())


def test_the_rows_of_the_model_are_all_chosen_ones_first() -> None:
    batch = batch_of(Pairs())
    rows = build(dpo()).inputs({**batch, "inputs": {"input_ids": batch["inputs"]}})["input_ids"]
    assert torch.equal(rows[:4], batch["inputs"][:, 0]) and torch.equal(rows[4:], batch["inputs"][:, 1])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Rows(), r"takes pairs: .* Those of the data are \[10\]\. Type data=chat"),
        (Empty(), "an answer has no token that counts"),
    ],
)
def test_a_batch_without_pairs_is_refused(dataset: Any, message: str) -> None:
    with pytest.raises(WordsError, match=message):
        build(dpo()).count(batch_of(dataset))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("objective=dpo",), "objective=dpo takes pairs of a chosen and a rejected answer, and data=text has none. Type data=chat"),
        (("objective=dpo", "data=synthetic"), "and data=synthetic has none"),
        (("objective=dpo", *PAIRS, "objective.beta=0"), "objective.beta is a number > 0"),
        (("objective=dpo", *PAIRS, "objective.beta=-1"), "objective.beta is a number > 0"),
        (("objective=dpo", *PAIRS, "objective.loss=sigmoit"), "Type objective.loss=sigmoid"),
        (("objective=dpo", *PAIRS, "objective.loss=ipo", "objective.label_smoothing=0.1"), "nothing reads it with objective.loss=ipo"),
        (("objective=dpo", *PAIRS, "mesh.cp=2", "devices=2"), "needs whole rows, and mesh.cp=2 splits them"),
        (("objective=dpo", *PAIRS, "model=cnn"), "objective=dpo needs a model of tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_launch(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(WordsError) as caught:
        plan(*words)
    assert message in str(caught.value)


def test_its_figures_can_choose_a_checkpoint() -> None:
    decided = plan("objective=dpo", *PAIRS, "checkpoint.best=eval_reward_accuracy")
    assert decided.checkpoint["best_is"] == "highest"
