"""The digest of a model: that of its bits, whoever holds them."""

from functools import partial
from typing import Any

import pytest
import torch
from small import PARTS, STRATEGIES, mesh_of, on_resident_mesh, small_gpt
from torch import nn

from dtrain.build import build
from dtrain.checkpoint.digest import digest
from dtrain.mesh import Mesh
from dtrain.parallel.order import parallelize
from dtrain.planned import PipelineShape


def of(mesh: Mesh, strategy: Any, tied: bool = False) -> str:
    model = small_gpt(tied=tied)
    parallelize(model, mesh, build(strategy), precision=build(PARTS["precision"]), seed=1, pipeline=PipelineShape())
    return digest(model, mesh)


@pytest.mark.parametrize(
    ("strategy", "degrees"),
    [("fsdp", {"dp_shard": 2}), ("ddp", {"tp": 2}), ("ddp", {"pp": 2}), ("ddp", {"dp_replicate": 2})],
)
@pytest.mark.parametrize("tied", [False, True])
def test_every_mesh_has_the_same(strategy: str, degrees: dict[str, int], tied: bool) -> None:
    if tied and "pp" in degrees:
        return  # no stage has both
    (one,) = on_resident_mesh(partial(of, strategy=PARTS["strategy"], tied=tied))
    assert set(on_resident_mesh(partial(of, strategy=STRATEGIES[strategy], tied=tied), **degrees)) == {one}


def test_one_bit_is_another_digest() -> None:
    def changed(mesh: Mesh) -> list[str]:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        found = [digest(model, mesh)]
        for tensor in (*model.parameters(), *(each for each in model.buffers() if each.is_floating_point())):
            bits = tensor.detach().view(torch.int32).view(-1)
            for place in (0, len(bits) - 1):
                bits[place] ^= 1
                found.append(digest(model, mesh))
                bits[place] ^= 1
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.flip(0))
        return [*found, digest(model, mesh)]

    with mesh_of() as mesh:
        found = changed(mesh)
    assert len(set(found)) == len(found)
