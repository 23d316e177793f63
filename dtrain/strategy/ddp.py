"""Every rank holds everything; gradients are averaged in buckets while the backward runs (arXiv 2006.15704).

Beside pp, tp or ep the averaging is FSDP2's, with one shard: DistributedDataParallel around the stages of a pipeline fails an assertion
or is wrong without a word (https://github.com/pytorch/torchtitan/issues/577).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dtrain.mesh import Mesh
from dtrain.precision import Precision
from dtrain.strategy.fsdp import shard_blocks, sync_blocks
from dtrain.strategy.outputs import restore, show


@dataclass(frozen=True)
class DDP:
    """`bucket_mb` in MiB of gradients per all-reduce; `find_unused_parameters` for models of which a step reaches only a part."""

    bucket_mb: float
    find_unused_parameters: bool = False
    view: ClassVar[Literal["replicated"]] = "replicated"
    rests: ClassVar[Literal["device"]] = "device"

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        if mesh.shape.pp * mesh.shape.tp * mesh.shape.ep > 1:
            shard_blocks(model, mesh, precision, view=self.view, again=False, rests=self.rests)

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        if isinstance(model, FSDPModule) or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True, find_unused_parameters=self.find_unused_parameters
        )
        if self.find_unused_parameters:
            model.register_forward_hook(show)
            wrapped.register_forward_hook(restore)
        return wrapped

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        if isinstance(model, FSDPModule):
            sync_blocks(model, reduce=last, last=last)
        if last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        return cast(AbstractContextManager[None], model.no_sync())
