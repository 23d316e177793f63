"""Expert parallelism: each rank of `ep` holds some of the experts, and rows are sent to them and back (GShard, arXiv
2006.16668).

    rows sorted by expert -> counts, then rows, by all-to-all -> this rank's experts -> all-to-all -> rows as they were

The ranks of `ep` see different samples. The gradient of an expert is a sum over all its rows, from every rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from dtrain.errors import WordsError
from dtrain.mesh import Mesh
from dtrain.model.moe import Compute, Experts, experts_of, order, take


def apply(model: nn.Module, mesh: Mesh) -> None:
    """Split every `Experts` of the model over `ep`, in place; it may be on the meta device. Raises WordsError if the
    experts do not divide.
    """
    for experts in experts_of(model):
        _split(experts, mesh.axis("ep", view="experts"))


def check(model: nn.Module, ep: int) -> None:
    """Raises WordsError for a model without `Experts`: nothing else is split over ep."""
    if not experts_of(model):
        raise WordsError(
            f"mesh.ep={ep}: {type(model).__name__} holds no experts of dtrain.model.moe.Experts, so there is nothing "
            "to split. Build its mixture of them, type model=moe, or leave out mesh.ep."
        )


def _split(experts: Experts, mesh: DeviceMesh) -> None:
    if len(experts.gate) % mesh.size():
        raise WordsError(
            f"model.experts={len(experts.gate)} does not split over mesh.ep={mesh.size()} ranks. Type a multiple of "
            f"{mesh.size()}."
        )
    for name, weight in list(experts.named_parameters(recurse=False)):
        shard = distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(shard, weight.requires_grad))
    experts.exchange = AllToAll(mesh.get_group())


@dataclass(frozen=True)
class AllToAll:
    """The `Exchange` over the ranks of `group`; rank i holds the i-th part of the experts."""

    group: dist.ProcessGroup

    def __call__(self, x_RC: Tensor, load_E: Tensor, compute: Compute) -> Tensor:
        send = load_E.view(self.group.size(), -1)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        sent, received = torch.stack((send.sum(1), receive.sum(1))).tolist()
        x_SC = _Exchanged.apply(x_RC, sent, received, self.group)  # type: ignore[no-untyped-call]
        mine = torch.arange(receive.shape[1], device=x_RC.device).repeat(self.group.size())
        forth, back = order(mine.repeat_interleave(receive.flatten(), output_size=sum(received)))
        y_SC = take(compute(take(x_SC, forth, back), receive.sum(0)), back, forth)
        y_RC: Tensor = _Exchanged.apply(y_SC, received, sent, self.group)  # type: ignore[no-untyped-call]
        return y_RC


class _Exchanged(torch.autograd.Function):
    """Rows exchanged in a group: this many `sent` to and `received` from each rank; gradients go back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.way
        return _exchange(gradient, received, sent, group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out
