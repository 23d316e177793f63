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
