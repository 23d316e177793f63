"""A row in another order of its documents: the same outputs, or a refusal."""

from typing import Any

import pytest
import torch
from data.packed_models import Carries, Forgets, moe
from small import on_resident_mesh, small_gpt, tokens
from torch import nn

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.parallel.document_check import check_documents
from dtrain.precision.fp32 import build

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 0, 0]])


def problem(mesh: Mesh, model: nn.Module, positions: torch.Tensor = POSITIONS) -> str:
    inputs = {"input_ids": tokens(len(positions), 8), "position_ids": positions}
    batch = {"inputs": inputs, "targets": tokens(len(positions), 8)}

    def forward(batch: Any) -> Any:
        return model(**batch["inputs"])

    try:
        check_documents(model, batch, forward, mesh=mesh, precision=build())
    except WordsError as error:
        return str(error)
    return ""


def on_one(mesh: Mesh) -> list[str]:
    mixing = [problem(mesh, Forgets()), problem(mesh, Carries())]
    return [problem(mesh, small_gpt()), problem(mesh, moe()), problem(mesh, Forgets(), POSITIONS[1:2]), *mixing]


def test_models_that_mix_documents_are_told_from_those_that_do_not() -> None:
    (found,) = on_resident_mesh(on_one)
    assert found[:3] == ["", "", ""], "also of rows with one document there is nothing to say"
    for text in found[3:]:
        assert "its outputs for a document depend on the others of the row" in text


def on_two(mesh: Mesh) -> str:
    return problem(mesh, Forgets(), POSITIONS[mesh.rank : mesh.rank + 1].flip(0))


@pytest.mark.parametrize("degrees", [{"dp_replicate": 2}])
def test_all_ranks_refuse_what_one_of_them_sees(degrees: dict[str, int]) -> None:
    assert all(on_resident_mesh(on_two, **degrees))
