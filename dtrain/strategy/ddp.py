"""Every rank holds a full copy; gradients are averaged in buckets during the backward (arXiv 2006.15704).

With pp, tp or ep they are averaged after the backward: DistributedDataParallel around pipeline stages fails an
assertion or is silently wrong (https://github.com/pytorch/torchtitan/issues/577), and it does not take sharded
parameters.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dtrain.mesh import Mesh
from dtrain.mesh.sharding import local, reduced, split_like
from dtrain.model.adapted import packed
from dtrain.model.listed import check_listed
from dtrain.model.moe import Experts, experts_of
from dtrain.precision import Precision
from dtrain.strategy import Carried, carried
from dtrain.strategy.units import EXPERTS, Order
from dtrain.strategy.writes import refuse_max_norm

# in depthwise convolutions, strides of dims of size 1 differ from the bucket's: users can do nothing about it
warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")

MESSAGE = "message of dtrain"
"""Name of a parameter that no attribute of a model can have."""


class DDP:
    """DistributedDataParallel. `bucket_mb`: MiB of gradients per all-reduce."""

    holds: ClassVar[Literal["copies"]] = "copies"
    offload: ClassVar[Literal["none"]] = "none"

    def __init__(self, *, bucket_mb: float) -> None:
        self.bucket_mb = bucket_mb
        self._afterwards: list[tuple[list[nn.Parameter], dist.ProcessGroup, int]] = []
        """Parameters to average after the backward: (parameters, the ranks with copies of them, divisor of their
        sum)."""
        self._orders: list[Order] = []
        self._trained: list[nn.Parameter] = []
        self._message: nn.Parameter | None = None
        """Its gradient is the sum of the ranks' messages, in the bucket that is reduced last."""
        self._is_accumulating = False

    def shard(self, model: nn.Module, mesh: Mesh, precision: Precision) -> None:
        return

    def wrap(self, model: nn.Module, mesh: Mesh) -> nn.Module:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if mesh.batch_ranks > 1:
            refuse_max_norm(model, "every rank looks up other rows, so the copies drift apart")
        if not trained:
            return model
        if mesh.shape.pp * mesh.shape.tp * mesh.shape.ep > 1:
            split = experts_of(model) if mesh.shape.ep > 1 else []
            experts, batch = {id(p) for module in split for p in module.parameters()}, mesh.group("batch")
            copies = mesh.axis("expert_shard", view="experts").get_group() if split else batch
            self._afterwards.append(([p for p in trained if id(p) not in experts], batch, mesh.batch_ranks))
            self._afterwards.append(([p for p in trained if id(p) in experts], copies, mesh.batch_ranks))
            if split and mesh.shape.pp == 1:
                self._orders.append(order := Order(model, batch, EXPERTS))
                for name, module in model.named_modules():
                    if isinstance(module, Experts) and module.exchange is not None:
                        module.exchange = order.followed(name, module.exchange)
            return model
        self._trained.extend(trained)
        self._message = nn.Parameter(torch.zeros(carried(model), device=mesh.device, dtype=trained[0].dtype))
        if narrow := packed(model):  # meta parameters, and buffers that every rank has read for itself
            layers = {name.removesuffix("weight") for name in narrow}
            held = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] + "." in layers]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*narrow, *held])
        model._parameters[MESSAGE] = self._message  # while DistributedDataParallel lists the parameters
        check_listed(model)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True)
        del model._parameters[MESSAGE]
        wrapped.broadcast_buffers = False  # dtrain/loop/agreement.py synchronises them after the step
        _settle_buckets(wrapped, [self._message, *trained])
        return wrapped

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[list[nn.Parameter] | None]:
        if self._afterwards and last:
            return self._average()
        if not isinstance(model, DistributedDataParallel):
            return nullcontext()
        if not last:
            self._is_accumulating = True
            return cast(AbstractContextManager[None], model.no_sync())
        return self._complete()

    @contextmanager
    def _average(self) -> Iterator[list[nn.Parameter]]:
        missing = Carried()
        yield missing
        for order in self._orders:
            order.end()
        bucket = int(self.bucket_mb * 2**20)
        (parameters, group, divisor), *others = self._afterwards
        for some, ranks, by in others:
            missing += average(some, ranks, by, bucket=bucket)
        missing += absent(parameters)
        message = [missing.message().clone()] if missing.message else []
        average(parameters, group, divisor, bucket=bucket, beside=message)
        missing.sums = next(iter(message), None)

    @contextmanager
    def _complete(self) -> Iterator[list[nn.Parameter]]:
        """Reduce every bucket: the message fills the last one, and parameters that this rank's samples did not reach
        have zeros.
        """
        before: list[tuple[Tensor | None, int | None]] = []
        if self._is_accumulating:
            before = [(p.grad, getattr(p.grad, "_version", None)) for p in self._trained]
        missing = Carried()
        yield missing
        unreached = absent(self._trained)
        missing += unreached
        if self._is_accumulating:
            pairs = zip(self._trained, before, strict=True)
            unreached = [p for p, (was, at) in pairs if p.grad is was and getattr(was, "_version", None) == at]
            self._is_accumulating = False
            before.clear()  # the accumulated gradients are in the buckets now
        assert self._message is not None
        message = missing.message() if missing.message else self._message.detach()
        zeros = [torch.zeros_like(parameter) for parameter in unreached]
        frozen = [parameter for parameter in unreached if not parameter.requires_grad]  # by this forward
        for parameter in frozen:
            parameter.requires_grad_()
        try:
            torch.autograd.backward([self._message, *unreached], [message.to(self._message.dtype), *zeros])
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        missing.sums, self._message.grad = self._message.grad, None


def absent(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters without a gradient."""
    return [parameter for parameter in parameters if parameter.grad is None]


def _settle_buckets(wrapped: DistributedDataParallel, listed: list[nn.Parameter]) -> None:
    """Have the buckets of the first step be those of all others, in the reverse order of the parameters.

    DistributedDataParallel begins with one bucket for all gradients and makes others in the second step. On three
    ranks or more, what is in a bucket decides in which order numbers are added: a run that resumes would differ from
    one that was not stopped.
    """
    wrapped.reducer.prepare_for_backward([])
    for parameter in reversed(listed):
        torch.autograd.backward(parameter, torch.zeros_like(parameter))
    for parameter in listed:
        parameter.grad = None


@torch.no_grad()
def average(
    parameters: list[nn.Parameter],
    group: dist.ProcessGroup,
    divisor: int,
    *,
    bucket: int,
    beside: Sequence[Tensor] = (),
) -> list[nn.Parameter]:
    """Sum gradients, and the tensors `beside` them, over `group` and divide them, in place, in all-reduces of about
    `bucket` bytes, two at a time. Returns the parameters without a gradient, which count as zero.

    Parameters that tensor parallelism replicates may have partial gradients, which are first summed over tp.
    """
    pieces: dict[torch.dtype, list[Tensor]] = {}
    missing = absent(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad = reduced(parameter)
        pieces.setdefault(parameter.grad.dtype, []).append(local(parameter.grad))
    for tensor in beside:
        pieces.setdefault(tensor.dtype, []).append(tensor)
    if group.size() == 1:
        if divisor > 1:
            torch._foreach_div_([piece for same in pieces.values() for piece in same], divisor)
        return missing
    in_flight: tuple[dist.Work, Tensor, list[Tensor]] | None = None
    for some in (some for same in pieces.values() for some in _buckets(same, bucket)):
        flat = torch.cat([piece.flatten() for piece in some])
        work = dist.all_reduce(flat, group=group, async_op=True)
        _put_back(in_flight, divisor)
        in_flight = work, flat, some
    _put_back(in_flight, divisor)
    return missing


def _put_back(in_flight: tuple[dist.Work, Tensor, list[Tensor]] | None, divisor: int) -> None:
    """Wait for a bucket and copy it back; the next one is reduced meanwhile."""
    if in_flight:
        work, flat, some = in_flight
        work.wait()
        torch._foreach_copy_(some, split_like(flat.div_(divisor), some))


def _buckets(pieces: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    some, filled = list[Tensor](), 0
    for piece in pieces:
        some.append(piece)
        filled += piece.nbytes
        if filled >= size:
            yield some
            some, filled = [], 0
    if some:
        yield some
