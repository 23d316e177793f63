"""Optimizers held against their own definition in fp64: weights of every shape, gradients of every size, whole and sharded.

agree(build, reference, [(1e-8, {"lr": 0.1, ...})], dp_shard=3)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from small import on_resident_mesh
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dtrain.mesh import Mesh
from dtrain.mesh.sharding import like, region

SCALES = (1e-8, 1e-6, 1e-5, 1e-4, 1e-2, 1.0, 1e2)
"""Root mean squares of gradients."""
SHAPES: Mapping[str, tuple[int, ...]] = {
    "vector": (7,), "single": (1,), "tall": (13, 4), "wide": (4, 13), "row": (1, 6), "column": (6, 1), "few": (2, 5), "square": (32, 32),
    "cube": (5, 4, 6), "conv": (6, 3, 2, 2), "depthwise": (2, 1, 3, 3), "silent": (5, 4), "late": (4, 3), "later": (6,),
}  # fmt: skip
"""Of which three ranks leave one without a row of `few`; `silent` has gradients of zero, `late` and `later` none in the first step."""
STEPS = 4

MESHES = ({"dp_shard": 3}, {"tp": 2}, {"dp_shard": 2, "tp": 2})

Made = Callable[..., Any]
"""(model=..., **arguments) -> an optimizer of dtrain."""
Reference = Callable[..., Any]
"""(weights by name, in fp64, **arguments) -> an optimizer by its definition."""
Case = tuple[float, Mapping[str, Any]]
"""The size of gradients, and arguments."""


class Weights(nn.Module):
    """A parameter of each shape, and none of them used."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(_draw(name, 0, shape)))


def gradient(name: str, step: int, shape: tuple[int, ...], scale: float) -> Tensor | None:
    """Rows and columns of sizes that differ up to a hundredfold, so that what is averaged over them shows."""
    if name == "silent":
        return torch.zeros(shape)
    if name.startswith("late") and step == 0:
        return None
    values = _draw(name, step + 1, shape)
    for dim, size in enumerate(shape[-2:], max(0, len(shape) - 2)):
        values = values * torch.logspace(-1, 1, size).view([size if dim == d else 1 for d in range(len(shape))])
    return values * (scale / values.square().mean().sqrt())


def far(made: Made, reference: Reference, case: Case, mesh: Mesh | None = None) -> dict[str, float]:
    """How far each weight is from the reference after some steps, relative to the largest of its tensor."""
    (scale, arguments), shapes = case, {**SHAPES, **({} if mesh and mesh.shape.dp_shard > 1 else {"scalar": ()})}
    model = Weights(shapes)
    exact = {name: parameter.detach().double().requires_grad_() for name, parameter in model.named_parameters()}
    if mesh:
        shard(model, mesh)
    optimizer, definition = made(model=model, **arguments), reference(exact, **arguments)
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            values = gradient(name, step, shapes[name], scale)
            parameter.grad = None if values is None else like(values[region(parameter)].clone(), parameter)
            exact[name].grad = None if values is None else values.double()
        optimizer.step()
        definition.step()
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    moved = {name: not torch.equal(p.detach(), _draw(name, 0, shapes[name])) for name, p in whole.items()}
    assert all(moved[name] for name in shapes if name != "silent"), "every weight moves"
    return {
        name: ((p.detach().double() - exact[name]).abs().max() / exact[name].abs().max()).item()
        for name, p in whole.items()
    }


def _far_on(mesh: Mesh, made: Made, reference: Reference, cases: Sequence[Case]) -> list[dict[str, float]]:
    return [far(made, reference, case, mesh) for case in cases]


def agree(made: Made, reference: Reference, cases: Iterable[Case], **degrees: int) -> None:
    """Every weight is the reference's to 1e-6, on every rank of a mesh; without degrees in this process."""
    listed = list(cases)
    if not degrees:
        found = [[far(made, reference, case) for case in listed]]
    else:
        found = on_resident_mesh(partial(_far_on, made=made, reference=reference, cases=listed), **degrees)
    for runs in found:
        for case, run in zip(listed, runs, strict=True):
            assert not {name: distance for name, distance in run.items() if not distance < 1e-6}, case


def by_decay(weights: Mapping[str, Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Groups as dtrain's words make them: what has one dim, but for dims of 1, does not decay."""
    matrices = [weight for weight in weights.values() if sum(size > 1 for size in weight.shape) > 1]
    rest = [weight for weight in weights.values() if sum(size > 1 for size in weight.shape) <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


def shard(model: nn.Module, mesh: Mesh) -> None:
    """As tensor parallelism and FSDP would: over tp by rows and by columns in turn (evenly, if FSDP comes after), over dp_shard by rows."""
    for index, (name, parameter) in enumerate(list(model.named_parameters())):
        dim = index % 2 if parameter.ndim > 1 else 0
        if (
            mesh.shape.tp > 1
            and parameter.ndim
            and (mesh.shape.dp_shard == 1 or parameter.shape[dim] % mesh.shape.tp == 0)
        ):
            model.register_parameter(
                name, nn.Parameter(distribute_tensor(parameter.detach(), mesh.axis("tp"), [Shard(dim)]))
            )
    if mesh.shape.dp_shard > 1:
        fully_shard(model, mesh=mesh.axis("dp_shard"))


def _draw(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    seed = sum(map(ord, name)) * 100 + step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
