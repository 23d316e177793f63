"""Every rank holds everything; gradients are averaged in buckets while the backward runs (arXiv 2006.15704)."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.mesh import Mesh
from dtrain.precision import Precision
from dtrain.strategy.outputs import restore, show


@dataclass(frozen=True)
class DDP:
    """`bucket_mb` in MiB of gradients per all-reduce; `find_unused_parameters` for models of which a step reaches only a part."""

    bucket_mb: float
    find_unused_parameters: bool = False

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        return

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True, find_unused_parameters=self.find_unused_parameters
        )
        if self.find_unused_parameters:
            model.register_forward_hook(show)
            wrapped.register_forward_hook(restore)
        return wrapped

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return cast(AbstractContextManager[None], model.no_sync())
