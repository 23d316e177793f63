"""A LightningModule is not taken for its forward alone without a word."""

from pathlib import Path

import pytest
from brought_lightning import Faces, Lit
from small import plan

import dtrain
from dtrain.errors import WordsError

SOURCE = """
import lightning as L
raise RuntimeError("it ran")
class Base(L.LightningModule):
    def configure_optimizers(self): ...
class Lit(Base):
    def training_step(self, batch, batch_idx): ...
    def train_dataloader(self): ...
"""


def test_what_would_be_left_out_must_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "litpkg.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    words = ("model._target_=litpkg.Lit", "trust=[litpkg]")
    with pytest.raises(WordsError) as raised:
        plan(*words)
    for word in ("objective=lightning", "optim=lightning", "data=dataset data.dataset._target_=<its dataset>"):
        assert word in str(raised.value), word
    data = ("data=dataset", "data.dataset._target_=litpkg.Faces")
    with pytest.raises(WordsError, match=r"Type optim=lightning for its configure_optimizers, or another optimizer\."):
        plan(*words, *data, "objective=lightning", "optim.lr=0.1")
    plan(*words, *data, "objective=classification", "optim=sgd")
    plan(*words, *data, "objective=lightning", "optim=lightning")


def test_one_that_is_passed_is_known_by_its_class() -> None:
    for model in (Lit, Lit()):
        with pytest.raises(WordsError, match=r"Lit is a LightningModule.* Type objective=lightning .*optim="):
            dtrain.plan(model=model, data=Faces())
        dtrain.plan("objective=lightning", "optim=lightning", model=model, data=Faces())


SCHEDULED = """
import lightning as L
from torch.utils.data import Dataset
class Faces(Dataset): ...
class Data(L.LightningDataModule): ...
class Own(Data): ...
class Lit(L.LightningModule):
    def training_step(self, batch, batch_idx): ...
    def configure_optimizers(self):
        optimizer, schedule = made()
        {body}
"""
LIT = (
    "model._target_=scheduledpkg.Lit", "objective=lightning", "optim=lightning", "data=dataset", "schedule=constant",
    "schedule.warmup=0",
)  # fmt: skip


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ("return [optimizer], [schedule]", True),
        ("return {'optimizer': optimizer, 'lr_scheduler': {'scheduler': schedule}}", True),
        ("return {'optimizer': optimizer, 'lr_scheduler': None}", False),
        ("both = {'optimizer': optimizer, 'lr_scheduler': schedule}\n        return both", True),
        ("return optimizer", False),
        ("return [optimizer], []", False),
        ("if schedule: return [optimizer], [schedule]\n        return optimizer", False),
    ],
)
def test_a_scheduler_that_the_source_shows_is_refused_with_the_plan(
    body: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scheduledpkg.py").write_text(SCHEDULED.replace("{body}", body))
    monkeypatch.syspath_prepend(tmp_path)
    words = (*LIT, "data.dataset._target_=scheduledpkg.Faces", "trust=[scheduledpkg]")
    if not is_refused:
        plan(*words)
        return
    with pytest.raises(WordsError, match=r"returns a scheduler, which dtrain does not step\. Type optim="):
        plan(*words)


def test_a_datamodule_is_no_dataset_and_all_packages_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scheduledpkg.py").write_text(SCHEDULED.replace("{body}", "return optimizer"))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("Data", "Own"):
        with pytest.raises(WordsError, match=rf"data\.dataset: scheduledpkg\.{name} is a DataModule") as raised:
            plan(*LIT, f"data.dataset._target_=scheduledpkg.{name}", "trust=[scheduledpkg]", "epochs=2")
        assert str(raised.value).count("\n") == 0
    for trust, needed in (("[]", "b,scheduledpkg"), ("[scheduledpkg]", "scheduledpkg,b")):
        with pytest.raises(WordsError, match=rf"Type trust=\[{needed}\] if you know what they do"):
            plan(*LIT, "data.dataset._target_=b.Faces", f"trust={trust}")
