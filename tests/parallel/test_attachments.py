"""What hangs on a parameter is on the one that takes its place: requires_grad under every style of tensor parallelism, attributes; anything else is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from pool import RankFailed, resident
from small import STRATEGIES, plan
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtrain.backend.gloo import Gloo
from dtrain.build import build
from dtrain.loop.assemble import assemble, prepare
from dtrain.mesh import Mesh
from dtrain.parallel.order import parallelize
from dtrain.planned import MeshShape, Plan
from dtrain.precision import Precision

GPT = "model=gpt model.layers=2 model.width=16 model.heads=4 model.kv_heads=2 data=synthetic data.sequence=8 batch=4"


def trained(asked: Plan) -> set[str]:
    """The parameters that the optimizer has state of after a step."""
    with Gloo(timeout=60).open():
        parts = assemble(asked, Mesh(asked.mesh, device="cpu"))
        training = prepare(parts)
        training.step(training.stream, 0)
        training.optimizer.step()
        training.stream.close()
        return {name for name, each in parts.model.named_parameters() if training.optimizer.state.get(each)}


@pytest.mark.parametrize("frozen", ["adapter=lora", "model.freeze=[blocks.0]"])
def test_frozen_parameters_stay_frozen_under_tensor_parallelism(frozen: str) -> None:
    whole = plan(*GPT.split(), frozen, "devices=1")
    (expected,) = resident(1, trained, whole)
    for layout in ("mesh.tp=2 devices=2 tensor.sequence=split", "mesh.tp=2 devices=2"):
        assert resident(2, trained, plan(*GPT.split(), frozen, *layout.split())) == [expected] * 2, layout


class PerHead(nn.Module):
    """Norms in heads, as in Qwen3; one of them is frozen."""

    tp_plan = {"up": "colwise", "norm": "replicated_with_grad_allreduce", "down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.LayerNorm(2), nn.Linear(8, 4)
        self.norm.requires_grad_(False)
        self.up.weight.group = "slow"  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.norm(self.up(x).unflatten(-1, (-1, 2))).flatten(-2))
        return out


class Hooked(PerHead):
    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda grad: grad)


class OnMeta(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.register_hook(lambda grad: grad)


FAILED: list[Exception] = []


class Caught(PerHead):
    """Keeps an error of its own making, as a log does, and so the frame in which a parameter had a name."""

    def __init__(self) -> None:
        super().__init__()
        last = self.down.bias
        try:
            raise ImportError(f"{last.ndim} dims are no package")
        except ImportError as error:
            FAILED.append(error)


def split() -> bool:
    with Gloo(timeout=60).open():
        return isinstance(wrapped(Caught, STRATEGIES["ddp"], {"tp": 2}).down.weight, DTensor)


def test_a_frame_that_has_ended_is_no_closure_of_the_users() -> None:
    assert resident(2, split) == [True, True]


def wrapped(kind: type[nn.Module], strategy: Any, degrees: dict[str, int], device: str = "cpu") -> nn.Module:
    with torch.device(device):
        model = kind()
    parallelize(
        model, Mesh(MeshShape(**degrees), device="cpu"), build(strategy), precision=Precision(), seed=0, brought=True
    )
    return model


def facts(degrees: dict[str, int]) -> dict[str, Any]:
    with Gloo(timeout=60).open():
        model = wrapped(PerHead, STRATEGIES["fsdp"], degrees)
        named = model.named_parameters()
        return {name: (isinstance(p, DTensor), p.requires_grad, getattr(p, "group", None)) for name, p in named}


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"dp_shard": 2}])
def test_a_new_parameter_has_the_attributes_of_the_old_one(degrees: dict[str, int]) -> None:
    here = resident(2, facts, degrees)[0]
    assert here["up.weight"] == (True, True, "slow")
    assert here["norm.weight"] == (True, False, None)
    assert here["down.weight"] == (True, True, None)


def refused(kind: type[nn.Module], strategy: Any, degrees: dict[str, int], device: str) -> None:
    with Gloo(timeout=60).open():
        wrapped(kind, strategy, degrees, device)


@pytest.mark.parametrize(
    ("kind", "strategy", "degrees", "device", "message"),
    [
        (Hooked, "ddp", {"tp": 2}, "cpu", "mesh.tp: up.weight has a hook, and splitting replaces .* Leave out mesh.tp"),
        (Hooked, "fsdp", {"tp": 2}, "cpu", "Type strategy=ddp, and leave out mesh.tp"),
        (OnMeta, "ddp", {"dp_replicate": 2}, "meta", "model: weight has a hook, and allocating replaces"),
    ],
)
def test_what_a_new_parameter_cannot_have_is_refused(
    kind: type[nn.Module], strategy: str, degrees: dict[str, int], device: str, message: str
) -> None:
    with pytest.raises(RankFailed, match=message):
        resident(2, partial(refused, kind, STRATEGIES[strategy], degrees, device))
