"""The optimizer of configure_optimizers, in each form that it may return; one with a scheduler is refused."""

from typing import Any

import pytest
import torch
from brought_lightning import Lit

from dtrain.errors import WordsError
from dtrain.optim.lightning import build


def returning(form: str) -> Lit:
    model = Lit()
    adam = torch.optim.Adam(model.parameters(), lr=0.3)
    step = torch.optim.lr_scheduler.StepLR(adam, 5)
    forms: dict[str, Any] = {
        "one": adam, "list": [adam], "mapping": {"optimizer": adam}, "lists": ([adam], []),
        "two": [adam, adam], "none": None,
        "scheduler": {"optimizer": adam, "lr_scheduler": {"scheduler": step, "interval": "step"}},
        "schedulers": ([adam], [step]),
    }  # fmt: skip
    model.configure_optimizers = lambda: forms[form]  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("form", ["one", "list", "mapping", "lists"])
def test_one_optimizer_is_taken(form: str) -> None:
    assert build(model=returning(form)).param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("two", "dtrain steps one optimizer"),
        ("none", "returns a NoneType"),
        ("scheduler", "StepLR, which dtrain does not step. Type optim=<word>"),
        ("schedulers", "StepLR, which dtrain does not step. Type optim=<word>"),
    ],
)
def test_others_are_refused(form: str, message: str) -> None:
    with pytest.raises(WordsError, match=message):
        build(model=returning(form))
