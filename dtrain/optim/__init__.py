"""How weights move. Every word builds a torch optimizer over the model's parameters, in groups that say what decays."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtrain.mesh.sharding import like, local
from dtrain.optim.decay import decayed


class Optimizer(Protocol):
    """The part of torch.optim.Optimizer that a run needs."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Any: ...

    def step(self) -> Any: ...

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any: ...


def groups(
    model: nn.Module,
    *,
    weight_decay: float,
    rates: Mapping[int, float] | None = None,
    without: Iterable[nn.Parameter] = (),
) -> list[dict[str, Any]]:
    """Of the trained parameters but `without`, those that decay and those that do not (decay.py). `rates`: id of a
    parameter -> a learning rate of its own. A stage of a pipeline on which nothing is trained has one group without
    parameters.
    """
    others, matrices = set(map(id, without)), set(map(id, decayed(model)))
    trained = [each for each in model.parameters() if each.requires_grad and id(each) not in others]
    both = [
        {"params": [each for each in trained if id(each) in matrices], "weight_decay": weight_decay},
        {"params": [each for each in trained if id(each) not in matrices], "weight_decay": 0.0},
    ]
    return by_rate([group for group in both if group["params"]] or both[:1], rates or {})


def by_rate(groups: Iterable[dict[str, Any]], rates: Mapping[int, float]) -> list[dict[str, Any]]:
    """Split groups, so that all parameters of one have the same learning rate."""
    if not rates:
        return [*groups]
    parts = list[dict[str, Any]]()
    for group in groups:
        own: dict[float | None, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            own.setdefault(rates.get(id(parameter)), []).append(parameter)
        parts += [
            {**group, "params": some} | ({} if rate is None else {"lr": rate})
            for rate, some in (own or {None: []}).items()
        ]
    return parts


def elementwise(kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], **options: Any) -> Optimizer:
    """A torch optimizer that treats every number alone, by the fastest update there is: one fused kernel over the
    pieces this rank holds.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    # torch 2.13's fused SGD on the CPU leaves bfloat16 and float16 weights as they are, without a word
    types = {(p.device.type, p.dtype) for p in parameters}
    fits = all(t.is_floating_point and (on != "cpu" or t in (torch.float32, torch.float64)) for on, t in types)
    options |= {"fused": True} if fits else {"foreach": True}
    if any(isinstance(p, DTensor) for p in parameters):
        return LocalShardOptimizer(kind, groups, **options)
    return kind(groups, **options)


def inner(optimizer: Optimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers it is made of."""
    if isinstance(optimizer, OptimizerGroup):
        return [part for each in optimizer.parts for part in inner(each)]
    return [optimizer.inner if isinstance(optimizer, LocalShardOptimizer) else cast(torch.optim.Optimizer, optimizer)]


def forget(optimizer: Optimizer) -> None:
    """Drop its state: as in the beginning."""
    for part in inner(optimizer):
        part.state.clear()


class ByGroup(torch.optim.Optimizer):
    """A torch optimizer whose `update` gets the parameters of a group that have a gradient."""

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.update(parameters, group)


class LocalShardOptimizer:
    """`kind` over the local pieces of `groups`: DTensors of several meshes in one kernel, and without DTensor's
    dispatch for each.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], **options: Any) -> None:
        pieces = [{**group, "params": [nn.Parameter(local(p.detach())) for p in group["params"]]} for group in groups]
        self.inner = kind(pieces, **options)
        self.param_groups = [
            {**inner, "params": group["params"]} for inner, group in zip(self.inner.param_groups, groups, strict=True)
        ]
        inside = [piece for group in self.inner.param_groups for piece in group["params"]]
        self._pairs = list(zip((parameter for group in groups for parameter in group["params"]), inside, strict=True))

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """Of each parameter, sharded as it is; the memory is the optimizer's own."""
        states: dict[Tensor, dict[str, Any]] = {}
        for parameter, piece in self._pairs:
            if piece in self.inner.state:
                states[parameter] = dict(self.inner.state[piece])
                for name, value in states[parameter].items():
                    if isinstance(value, Tensor) and value.ndim:
                        states[parameter][name] = like(value, parameter)
        return states

    @torch.no_grad()
    def step(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({name: value for name, value in group.items() if name != "params"})
        for parameter, piece in self._pairs:
            piece.data = local(parameter)  # FSDP2 moves it at the first forward
            piece.grad = None if parameter.grad is None else local(parameter.grad)
        self.inner.step()
        for _, piece in self._pairs:
            piece.grad = None  # or the gradients of this step would live through the next one's backward

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        return self.inner.register_step_post_hook(hook)


class OptimizerGroup:
    """Several optimizers over different parameters, used as one."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.parts = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {parameter: state for optimizer in self.parts for parameter, state in optimizer.state.items()}

    def step(self) -> None:
        for optimizer in self.parts:
            optimizer.step()

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        return self.parts[-1].register_step_post_hook(hook)
