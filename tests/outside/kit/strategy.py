"""Sharded as dtrain's fsdp is, gradients in every microbatch; without inheriting from it."""

from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import nn

from dtrain.mesh import Mesh
from dtrain.precision import Precision
from dtrain.strategy.fsdp import FSDP


class Thin:
    about: ClassVar = {"fill": "dp_shard", "holds": "shards", "reshard": "forward", "reduce": "every", "try": True}
    holds = "shards"
    offload = "none"

    def __init__(self) -> None:
        self._inner = FSDP(reshard="forward", offload="none", reduce="every")

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        self._inner.shard(model, mesh, precision)

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        return self._inner.wrap(model, mesh)

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        return self._inner.sync(model, last)


class Silent(Thin):
    """States nothing."""

    about: ClassVar = {"holds": None}
