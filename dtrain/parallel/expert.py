"""Expert parallelism: each rank of `ep` holds a part of the experts, and rows travel to them and back (GShard, arXiv
2006.16668).

    rows sorted by expert -> counts, then rows, by all-to-all -> this rank's experts -> all-to-all -> rows as they were

The ranks of `ep` see different samples. The gradient of an expert is summed over all rows that came to it, from
whatever rank.
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
from dtrain.model.moe import Compute, Experts, order, take


def apply(model: nn.Module, mesh: Mesh) -> None:
    """Split every `Experts` of the model over `ep`, in place; it may be on the meta device, and stays whole when ep is
    1.

    `view`: how the ranks that hold the same experts share them (dtrain.mesh). Values that are there stay. Raises
    WordsError when the experts do not divide.
    """
    if mesh.shape.ep == 1:
        return
    for module in model.modules():
        if isinstance(module, Experts):
            _split(module, mesh.axis("ep", view="experts"))


def check(model: nn.Module, ep: int) -> None:
    """Raises WordsError for a model without `Experts`: nothing else is split over ep."""
    if not any(isinstance(module, Experts) for module in model.modules()):
        raise WordsError(
            f"mesh.ep={ep}: {type(model).__name__} holds no experts of dtrain.model.moe.Experts, so there is nothing "
            "to split. "
            "Build its mixture of them, type model=moe, or leave mesh.ep out."
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
    """The `Exchange` over the ranks of `group`, of which rank i holds the i-th part of the experts."""

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
    """Rows to the ranks of a group, `sent` to and `received` from each; gradients go the way back."""

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
