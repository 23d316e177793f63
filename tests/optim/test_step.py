"""Optimizers of the user's own: what a run cannot drive, and what torch cannot do to split weights."""

import pytest
import torch
from small import on_resident_mesh
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.optim.step import check_step, update

WEIGHTS = torch.arange(8.0).view(4, 2)


def test_an_optimizer_that_needs_a_closure_is_refused_before_the_first_step() -> None:
    with pytest.raises(WordsError, match=r"optim: LBFGS\.step needs closure, but .*takes no arguments\."):
        check_step(torch.optim.LBFGS([nn.Parameter(WEIGHTS)]))
    for kind in (torch.optim.AdamW, torch.optim.Rprop, torch.optim.SGD):
        check_step(kind([nn.Parameter(WEIGHTS)]))


def rprop(mesh: Mesh) -> str:
    weight = nn.Parameter(distribute_tensor(WEIGHTS.clone(), mesh.axis("dp_shard"), [Shard(0)]))
    weight.grad = torch.ones_like(weight)
    assert isinstance(weight.grad, DTensor)
    with pytest.raises(WordsError) as refused:
        update(torch.optim.Rprop([weight]))
    return str(refused.value)


def test_one_that_torch_cannot_run_on_split_weights_is_named() -> None:
    for said in on_resident_mesh(rprop, dp_shard=2):
        assert said.startswith("optim: Rprop cannot update weights that are split over ranks: ")
        assert "Type strategy=ddp" in said


def test_other_errors_of_a_step_stay_what_they_are() -> None:
    weight = nn.Parameter(WEIGHTS.clone())

    class Wrong(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            raise RuntimeError("Sharding is not what fails here")

    with pytest.raises(RuntimeError, match="not what fails"):
        update(Wrong([weight]))
