"""model: one graph of the whole model, on one rank, with the losses of what is written."""

from typing import Any

import pytest
import torch
from pool import ranks
from small import PARTS, agree, few_steps, plan
from torch import nn
from torch._dynamo.utils import counters

from dtrain.errors import WordsError

# torch's own compiler warns of what else of torch it uses
pytestmark = pytest.mark.filterwarnings("ignore")

COMPILED = {"_target_": "dtrain.compile.model.build", "mode": "default"}


@pytest.mark.parametrize("chunk", [0, 7], ids=["whole", "deferred"])
def test_a_model_is_one_graph_and_its_losses_stay(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, mode: compile(module, backend="aot_eager"))
    parts: dict[str, Any] = PARTS | {"objective": PARTS["objective"] | {"chunk": chunk}}

    def graphs() -> tuple[int, dict[str, Any]]:
        torch._dynamo.reset()
        counters.clear()
        run = few_steps(parts | {"compile": COMPILED}, {}, steps=2)
        return int(counters["aot_autograd"]["total"]), run

    (reference,) = ranks(1, lambda: few_steps(parts, {}, steps=2))
    ((count, run),) = ranks(1, graphs)
    assert count == 1
    agree(run, reference)


def test_more_ranks_are_refused_with_the_word_to_type() -> None:
    with pytest.raises(
        WordsError, match=r"compile=model is for one rank, but nodes x devices = 2.*Type compile=blocks"
    ):
        plan("compile=model", "devices=2")
