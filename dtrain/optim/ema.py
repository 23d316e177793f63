"""An exponential moving average of the weights (Polyak averaging), kept beside them on every mesh: each rank averages
what it holds.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dtrain.mesh.sharding import local
from dtrain.model import reshard


class EMA:
    """After each step, average = decay x average + (1 - decay) x weight; it starts as the weights. In fp32 at least,
    whatever the weights are in.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.averages = {name: _widened(weight.detach()).clone() for name, weight in self._weights.items()}
        """By the name of the parameter, sharded as it is."""

    @torch.no_grad()
    def update(self, gate: Tensor | None = None) -> None:
        """`gate`, on the device: 0 when the weights have not moved and nothing shall be averaged, else 1."""
        averages = [local(average) for average in self.averages.values()]
        weights = [_widened(local(weight)) for weight in self._weights.values()]
        if gate is None:
            torch._foreach_lerp_(averages, weights, 1 - self._decay)
        else:
            steps = torch._foreach_sub(weights, averages)
            torch._foreach_mul_(steps, gate * (1 - self._decay))
            torch._foreach_add_(averages, steps)

    def begin(self) -> None:
        """Start again from the weights as they are."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                local(self.averages[name]).copy_(local(weight))

    @contextmanager
    def instead(self, wrapped: nn.Module) -> Iterator[None]:
        """The averages stand where the weights stood, for as long as the context lasts. `wrapped` is the module that is
        called.
        """
        kept = {name: local(weight).detach().clone() for name, weight in self._weights.items()}
        self._put(self.averages, wrapped)
        try:
            yield
        finally:
            self._put(kept, wrapped)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor], wrapped: nn.Module) -> None:
        reshard(wrapped)
        for name, weight in self._weights.items():
            local(weight).copy_(local(values[name]))


def _widened(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32))
