"""One gradient clip for every mesh: the norm of the whole model, and gradients scaled so that it stays below a bound."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def clip(parameters: Sequence[nn.Parameter], bound: float | None, *, scale: float = 1.0) -> Tensor:
    """Divide gradients by `scale`, bound their global L2 norm by `bound` (None: do not), return the norm before: 0-dim, fp32.

    Works on local shards: one foreach norm, one all-reduce of a scalar per mesh of sharded gradients, one foreach product.
    """
    plain: list[Tensor] = []
    sharded: dict[DeviceMesh, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            sharded.setdefault(gradient.device_mesh, []).append(gradient.to_local())
        elif gradient is not None:
            plain.append(gradient)
    groups = [plain, *sharded.values()]
    square = torch.zeros((), device=next((group[0].device for group in groups if group), None))
    for mesh, group in [(None, plain), *sharded.items()]:
        if group:
            local = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(group))).float() ** 2
            if mesh is not None:
                dist.all_reduce(local, group=mesh.get_group("dp_shard"))
            square += local
    norm = square.sqrt() / scale
    if bound is not None or scale != 1.0:
        factor = torch.clamp(bound / (norm + 1e-6), max=1.0) / scale if bound is not None else torch.full_like(norm, 1 / scale)
        for group in groups:
            if group:
                torch._foreach_mul_(group, factor)
    return norm
