"""How weights move. Every word builds a torch optimizer over the model's parameters, in groups that say what decays."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Optimizer(Protocol):
    """The part of torch.optim.Optimizer that a run needs."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Any: ...

    def step(self) -> Any: ...

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any: ...


def groups(parameters: Iterable[nn.Parameter], *, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and other vectors do not."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    both = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in both if group["params"]]


def kernel(parameters: Iterable[Tensor]) -> dict[str, bool]:
    """The fastest update there is: one fused kernel for plain float tensors, a few foreach kernels for sharded ones on the CPU."""
    listed = list(parameters)
    fused = all(p.is_floating_point() and (p.is_cuda or (p.device.type == "cpu" and not isinstance(p, DTensor))) for p in listed)
    return {"fused": True} if fused else {"foreach": True}


class Together:
    """Several optimizers over different parameters, used as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {parameter: state for optimizer in self._optimizers for parameter, state in optimizer.state.items()}

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def register_step_post_hook(self, hook: Callable[..., None]) -> Any:
        return self._optimizers[-1].register_step_post_hook(hook)
