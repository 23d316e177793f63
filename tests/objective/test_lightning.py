"""A LightningModule trains by its own training_step, or is refused with what to type."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from brought_lightning import Faces, Hooked, Late, Lit
from torch.utils.data import DataLoader, Subset

import dtrain
from dtrain.data.dataset import Dataset
from dtrain.data.order import samples
from dtrain.errors import WordsError
from dtrain.model.seeds import derive

WORDS = (
    "objective=lightning", "optim=lightning", "schedule=constant", "schedule.warmup=0", "clip=null", "logger=[]",
    "batch=8", "steps=6", "data.holdout=0.2", "evaluate.every=3",
)  # fmt: skip


def by_hand(model: Lit, rows: list[list[int]]) -> list[float]:
    """The losses of Lightning's loop over these rows."""
    optimizer, losses = model.configure_optimizers(), list[float]()
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    for batch in rows:
        optimizer.zero_grad()
        loss = model.training_step(next(iter(DataLoader(Subset(Faces(), batch), 8))), 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_its_steps_are_those_of_a_loop_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(derive(0, "model"))
    order, _ = samples(np.arange(32), n=40, seed=derive(0, "data"))
    rows = Dataset(Faces(), holdout=0.0).original(order).reshape(4, 8)
    known = by_hand(Lit(), rows.tolist())
    dtrain.run(*WORDS, "data.holdout=0", "steps=4", model=Lit, data=Faces(), out=tmp_path / "a")
    written = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in written] == pytest.approx(known, abs=1e-6)
    assert [row["train_loss"] for row in written] == pytest.approx(known, abs=1e-6)


@pytest.mark.parametrize("words", [["strategy=ddp"], ["strategy=fsdp"]])
def test_two_ranks_have_the_same_losses(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    one = dtrain.run(*WORDS, "objective.together=4", "microbatch=4", model=Lit, data=Faces, out=tmp_path / "one")
    two = dtrain.run(*WORDS, *words, "devices=2", "objective.together=4", model=Lit, data=Faces, out=tmp_path / "two")
    assert two.loss == pytest.approx(one.loss, abs=1e-6)
    assert two.metrics == pytest.approx(one.metrics, abs=1e-6)
    assert one.metrics["eval_loss"] == one.metrics["eval_val_loss"] and 0 < one.metrics["eval_accuracy"] <= 1
    assert [*dtrain.load(tmp_path / "two", model=Lit, data=Faces).state_dict()] == [*Lit().state_dict()]
    answers = dtrain.predictions(tmp_path / "two", [Faces()[0][0]], model=Lit, data=Faces)
    assert len(answers[0]["prediction"]) == 2, "its forward answers"


def test_what_only_the_trainer_of_lightning_does_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        WordsError, match=r"Hooked has on_train_epoch_end, .* objective\.without=\[on_train_epoch_end\]"
    ):
        dtrain.run(*WORDS, model=Hooked, data=Faces, out=tmp_path / "hooked")
    dtrain.run(*WORDS, "objective.without=[on_train_epoch_end]", model=Hooked, data=Faces, out=tmp_path / "without")
    with pytest.raises(WordsError, match=r"Late reads self\.current_epoch, which only Lightning's Trainer has"):
        dtrain.run(*WORDS, model=Late, data=Faces, out=tmp_path / "late")
    with pytest.raises(WordsError, match="Linear has no training_step"):
        dtrain.run(*WORDS, model=torch.nn.Linear(4, 2), data=Faces, out=tmp_path / "plain")


def test_a_figure_that_only_the_run_knows_ends_it_and_is_kept(tmp_path: Path) -> None:
    asked = (*WORDS, "evaluate.every=1", "checkpoint.best=eval_val_loss", "checkpoint.best_is=lowest")
    stop = ("stop.metric=eval_accuracy", "stop.best_is=highest", "stop.patience=1", "stop.least=1")
    result = dtrain.run(*asked, *stop, model=Lit, data=Faces, out=tmp_path / "a")
    assert result.step == 2 and "eval_accuracy has not improved" in str(result.reason)
    assert set(result.best) == {"eval_accuracy", "eval_val_loss"}
    for word, said in (
        (
            "stop.metric=eval_acc",
            r"stop\.metric=eval_acc: the evaluation has no such figure\. Did you mean eval_accuracy",
        ),
        ("checkpoint.best=eval_acc", r"checkpoint\.best=eval_acc: the evaluation has no such figure\. Did you mean"),
    ):
        with pytest.raises(WordsError, match=r"Type \w+\.best_is=lowest or highest"):
            dtrain.plan(*WORDS, word, model=Lit, data=Faces)
        with pytest.raises(WordsError, match=said):
            typed = f"{word.split('.')[0]}.best_is=highest"
            dtrain.run(*WORDS, word, typed, model=Lit, data=Faces, out=tmp_path / word)
    with pytest.raises(WordsError, match="no evaluation of this run has this figure"):
        dtrain.plan(*WORDS, "stop.metric=val_loss", "stop.best_is=lowest", model=Lit, data=Faces)
    with pytest.raises(WordsError, match="of eval_loss the lowest is the best"):
        dtrain.plan(*WORDS, "stop.metric=eval_loss", "stop.best_is=highest", model=Lit, data=Faces)
