"""Every rank holds everything; gradients are averaged in buckets while the backward runs (arXiv 2006.15704).

Beside pp, tp or ep they are averaged after it: DistributedDataParallel around the stages of a pipeline fails an assertion or is wrong
without a word (https://github.com/pytorch/torchtitan/issues/577), and it takes no sharded parameters.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model.moe import Experts
from dtrain.precision import Precision
from dtrain.sharding import local
from dtrain.strategy.outputs import restore, show


@dataclass(frozen=True)
class DDP:
    """`bucket_mb` in MiB of gradients per all-reduce; `find_unused_parameters` for models of which a step reaches only a part."""

    bucket_mb: float
    find_unused_parameters: bool = False
    holds: ClassVar[Literal["copies"]] = "copies"
    rests: ClassVar[Literal["device"]] = "device"
    _afterwards: list[tuple[list[nn.Parameter], dist.ProcessGroup, int]] = field(default_factory=list)
    """(parameters, the ranks that hold the same, by what their sum is divided)."""

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        return

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            return model
        if mesh.shape.pp * mesh.shape.tp * mesh.shape.ep > 1:
            experts = (
                {id(p) for module in model.modules() if isinstance(module, Experts) for p in module.parameters()} if mesh.shape.ep > 1 else set()
            )
            alike = mesh.axis("expert_shard", view="experts").get_group() if experts else mesh.group("batch")
            self._afterwards.append(([p for p in trained if id(p) not in experts], mesh.group("batch"), mesh.batch_ranks))
            self._afterwards.append(([p for p in trained if id(p) in experts], alike, mesh.batch_ranks))
            return model
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True, find_unused_parameters=self.find_unused_parameters
        )
        if self.find_unused_parameters:
            model.register_forward_hook(show)
            wrapped.register_forward_hook(restore)
        return wrapped

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        if self._afterwards and last:
            return self._average()
        if last or not isinstance(model, DistributedDataParallel):
            return _unreached() if isinstance(model, DistributedDataParallel) else nullcontext()
        return cast(AbstractContextManager[None], model.no_sync())

    @contextmanager
    def _average(self) -> Iterator[None]:
        yield
        for parameters, group, divisor in self._afterwards:
            average(parameters, group, divisor, bucket=int(self.bucket_mb * 2**20))


@contextmanager
def _unreached() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "find_unused_parameters=True" not in str(error):
            raise
        raise WordsError(
            "strategy=ddp: the loss does not depend on all parameters, and ddp waits for their gradients. "
            "Type strategy.find_unused_parameters=true, or strategy=fsdp."
        ) from error


@torch.no_grad()
def average(parameters: list[nn.Parameter], group: dist.ProcessGroup, divisor: int, *, bucket: int) -> None:
    """Sum gradients over `group` and divide them, in place, in all-reduces of about `bucket` bytes; one that is missing counts as zero.

    Gradients of what tensor parallelism left whole may be parts of a sum over tp: they are added up first.
    """
    pieces: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if isinstance(parameter.grad, DTensor) and isinstance(parameter, DTensor) and parameter.grad.placements != parameter.placements:
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        pieces.setdefault(parameter.grad.dtype, []).append(local(parameter.grad))
    if group.size() == 1:
        if divisor > 1:
            torch._foreach_div_([piece for same in pieces.values() for piece in same], divisor)
        return
    for same in pieces.values():
        for some in _buckets(same, bucket):
            flat = torch.cat([piece.flatten() for piece in some])
            dist.all_reduce(flat, group=group)
            parts = flat.div_(divisor).split([piece.numel() for piece in some])
            torch._foreach_copy_(some, [part.view_as(piece) for part, piece in zip(parts, some, strict=True)])


def _buckets(pieces: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    some, held = list[Tensor](), 0
    for piece in pieces:
        some.append(piece)
        held += piece.nbytes
        if held >= size:
            yield some
            some, held = [], 0
    if some:
        yield some
