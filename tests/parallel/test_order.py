"""The order of wrapping: shards first, then memory and values, then the wrapper; whatever the model brings along survives."""

from functools import partial
from typing import Any

import pytest
import torch
from small import PARTS, STRATEGIES, on_resident_mesh
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtrain.build import build
from dtrain.mesh import Mesh
from dtrain.model import construct
from dtrain.parallel.order import materialize, parallelize

LAYOUTS: dict[str, tuple[Any, dict[str, int]]] = {
    "single": (PARTS["strategy"], {"dp_shard": 1}),
    "ddp": (STRATEGIES["ddp"], {"dp_replicate": 2}),
    "fsdp": (STRATEGIES["fsdp"], {"dp_shard": 2}),
}


class WithBuffer(nn.Module):
    """A model that fills its weights by name and has a table that is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[0](x) + self.table * self.scratch
        return out

    def init_weight(self, name: str, weight: Tensor, generator: torch.Generator) -> None:
        weight.normal_(generator=generator)


class Plain(nn.Module):
    """A model that knows nothing of this house."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def outputs(mesh: Mesh, target: str, strategy: Any) -> tuple[list[float], dict[str, list[float]]]:
    model = construct({"_target_": f"{__name__}.{target}"}, facts={}, seed=3)
    wrapped = parallelize(model, mesh, build(strategy), precision=build(PARTS["precision"]), seed=3).eval()
    whole = {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).flatten().tolist()
        for name, t in model.state_dict().items()
    }
    return wrapped(torch.ones(2, 4)).flatten().tolist(), whole


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("target", ["Plain", "WithBuffer"])
def test_any_model_begins_the_same_on_every_mesh(target: str, layout: str) -> None:
    strategy, degrees = LAYOUTS["single"]
    ((expected, weights),) = on_resident_mesh(partial(outputs, target=target, strategy=strategy), **degrees)
    strategy, degrees = LAYOUTS[layout]
    for first, theirs in on_resident_mesh(partial(outputs, target=target, strategy=strategy), **degrees):
        assert first == pytest.approx(expected, rel=1e-6)
        assert theirs == weights


def test_tables_that_are_no_weights_keep_their_values() -> None:
    strategy, degrees = LAYOUTS["single"]
    ((_, state),) = on_resident_mesh(partial(outputs, target="WithBuffer", strategy=strategy), **degrees)
    assert state["table"] == [0.0, 1.0, 2.0, 3.0]


def names(mesh: Mesh, strategy: Any) -> tuple[list[str], list[str]]:
    """Of the weights, before and after they are sharded."""
    model = construct(PARTS["model"], facts={"vocab": 13}, seed=0)
    before = [name for name, _ in model.named_parameters()]
    parallelize(model, mesh, build(strategy), precision=build(PARTS["precision"]), seed=0)
    return before, [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_keeps_its_names(layout: str) -> None:
    """A checkpoint of one strategy is read under another only because of that."""
    strategy, degrees = LAYOUTS[layout]
    for before, after in on_resident_mesh(partial(names, strategy=strategy), **degrees):
        assert before == after != []


def test_tied_weights_stay_tied_when_they_get_memory() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["a"].bias.requires_grad_(False)
    materialize(model, torch.device("cpu"))
    assert model["a"].weight is model["b"].weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not model["a"].bias.requires_grad
