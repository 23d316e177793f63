"""One rank holds everything."""

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal

from torch import nn

from dtrain.mesh import Mesh
from dtrain.precision import Precision


class Single:
    holds: ClassVar[Literal["copies"]] = "copies"
    offload: ClassVar[Literal["none"]] = "none"

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        return

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        return model

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        return nullcontext()
